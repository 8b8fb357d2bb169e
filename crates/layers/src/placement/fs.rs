//! A file system over several servers, each call at the server that the mapping names.
//!
//! The servers share one file system below, so that each of them could carry out any call. A file
//! is used at its home server only, and a name only at its directory's server. So all that one
//! server promises about a file or a name (atomic calls, locks, appends, exclusive creation) holds
//! for the whole projection. Servers need not speak with each other.

use std::sync::Arc;

use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, FsInfo, Fut,
    HoldLeases, Make, Name, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs,
    Timestamp, Uid, XattrSet, must_be_named, put_in_steps,
};

use super::file::PlacedFile;
use super::last_lookups::{FoundName, NameKey};
use super::mapping::Placement;
use super::places::FilePlaces;
use super::servers::{ONLY, PlacedServers, at_home, is_gone};
use super::slices::Slices;

/// Lookups of one name that find a file which is gone when its home server is asked. After that many
/// the name is reported as absent: others replace the file faster than it can be looked at.
const LOOKUPS_MAX: usize = 8;

/// Files without a name that are made for one, for each server: all but one in `e^16` get home.
const TMPFILE_TRIES: usize = 16;

/// The file system of a projection whose servers share one file system.
#[derive(Clone)]
pub struct PlacedFs {
    pub(super) shared: Arc<PlacedServers>,
}

impl PlacedFs {
    /// `servers` in the order of the definition that `placement` is of, one for each server. With failover
    /// one for each slice, in their order. `places` are those of the client.
    /// `holders` are the same servers if they lease what they own, and none if not.
    ///
    /// # Panics
    /// If there is not one file system for each.
    pub fn new(
        placement: Placement,
        places: Arc<FilePlaces>,
        servers: Vec<Arc<dyn FileSystem>>,
        holders: Vec<Arc<dyn HoldLeases>>,
    ) -> PlacedFs {
        let slices = Slices::of(placement);
        assert_eq!(servers.len(), slices.count(), "one file system for each server or slice");
        assert!(holders.is_empty() || holders.len() == servers.len(), "one holder for each");
        let info = servers[0].info().clone();
        PlacedFs { shared: Arc::new(PlacedServers { slices, servers, info, places, holders }) }
    }
}

impl FileSystem for PlacedFs {
    fn info(&self) -> &FsInfo {
        &self.shared.info
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.shared.home(id).path(id)
    }

    /// Of the server whose clock is behind all others: no file has a later time than its own
    /// server's clock.
    fn clock(&self) -> Option<Timestamp> {
        let clocks: Option<Vec<Timestamp>> =
            self.shared.servers.iter().map(|server| server.clock()).collect();
        clocks?.into_iter().min()
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.shared.home(self.shared.info.root).user_of(cx)
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        if let Some(server) = self.shared.only() {
            return server.lookup(cx, dir, name);
        }
        Box::pin(async move {
            let (shared, place) = (&*self.shared, (dir, name));
            let (at, key) = (shared.slices.name(dir, name), NameKey::of(dir, name));
            for _ in 0..LOOKUPS_MAX {
                let (entry, home) = shared.look_first(cx, (at, key), place).await?;
                if home == at {
                    return Ok(entry);
                }
                match shared.look_at_home(cx, (entry, home), place).await {
                    Err(error) if is_gone(&error) => {} // replaced in between
                    outcome => return outcome,
                }
            }
            Err(Error::new(Errno::ENOENT))
        })
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let at = self.shared.slices.directory(dir);
            let shared = &*self.shared;
            let entry = shared.taught(cx, (at, [dir]), || shared.at(at).parent(cx, dir)).await?;
            self.shared.at_home(cx, entry, at).await
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        at_home!(self, cx, id, getattr(cx, id))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        at_home!(self, cx, id, setattr(cx, id, set))
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        at_home!(self, cx, id, readlink(cx, id))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        if let Some(server) = self.shared.only() {
            return server.make(cx, dir, name, what);
        }
        let shared = &*self.shared;
        let at = shared.slices.name(dir, name);
        // Nobody has asked another server for the new file's attributes, so they are not old.
        let made = shared.taught(cx, (at, [dir]), move || shared.at(at).make(cx, dir, name, what));
        Box::pin(async move {
            let made = made.await;
            shared.looked_up(cx, NameKey::of(dir, name), made.as_ref());
            let entry = made?;
            shared.met((dir, name), &entry);
            Ok(shared.said_by(at, entry))
        })
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        if let Some(server) = self.shared.only() {
            return server.remove(cx, dir, name, kind);
        }
        let shared = &*self.shared;
        let named = shared.slices.name(dir, name);
        // Nearly always the kernel has just looked the name up.
        let known = match kind {
            RemoveKind::File => shared.last_found(cx, NameKey::of(dir, name)).map(FoundName::file),
            RemoveKind::Directory => Some(None),
        };
        let remove = move |at| move || shared.at(at).remove(cx, dir, name, kind);
        if let Some(file) = known {
            let at = shared.removing(named, file);
            if shared.stays((at, named), file) {
                return shared.taught(cx, (at, [dir]), remove(at));
            }
        }
        Box::pin(async move {
            let file = match known {
                Some(file) => file,
                None => shared.file_named(cx, (dir, name)).await,
            };
            let at = shared.removing(named, file);
            if shared.stays((at, named), file) {
                return shared.taught(cx, (at, [dir]), remove(at)).await;
            }
            let cx = &cx.in_steps();
            let remove = || shared.at(at).remove(cx, dir, name, kind);
            let mut holds = shared.holds(at);
            let removed = async {
                holds.name(cx, (dir, name)).await?;
                shared.taught(cx, (at, [dir]), remove).await?;
                shared.show_removed(cx, file, (at, named)).await;
                Ok(())
            };
            let removed = removed.await;
            holds.end(cx, removed).await
        })
    }

    /// At the server of the name that goes. The file system below applies it once, whatever two servers
    /// do at the same time.
    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        if let Some(server) = self.shared.only() {
            return server.rename(cx, from, to, how);
        }
        Box::pin(async move {
            let shared = &*self.shared;
            let named = shared.slices.name(from.0, from.1);
            let replaced = match how {
                RenameHow::Replace => shared.file_named(cx, to).await,
                RenameHow::NoReplace | RenameHow::Exchange => None,
            };
            // Both names are other files' now, or nobody's.
            for (dir, name) in [from, to] {
                shared.last_found(cx, NameKey::of(dir, name));
            }
            let at = shared.removing(named, replaced);
            let has_both = shared.holders.is_empty() || shared.slices.name(to.0, to.1) == at;
            if has_both && shared.stays((at, named), replaced) && !shared.learn() {
                return shared.at(at).rename(cx, from, to, how).await;
            }
            let cx = &cx.in_steps();
            let mut moved = shared.about_to_move(cx, at, (from, to), how).await;
            let rename = || shared.at(at).rename(cx, from, to, how);
            let mut holds = shared.holds(at);
            let renamed = async {
                holds.name(cx, from).await?;
                holds.name(cx, to).await?;
                shared.taught(cx, (at, [from.0, to.0]), rename).await?;
                shared.show_removed(cx, replaced, (at, named)).await;
                Ok(())
            };
            let renamed = renamed.await;
            holds.end(cx, renamed).await?;
            if moved.is_empty() {
                moved.extend(shared.has_moved(cx, to).await);
            }
            for moved in moved {
                shared.show_renamed(cx, moved, at).await;
            }
            Ok(())
        })
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        if let Some(server) = self.shared.only() {
            return server.link(cx, id, dir, name);
        }
        Box::pin(async move {
            let steps = cx.in_steps();
            let shared = &*self.shared;
            let (at, home) = (shared.slices.name(dir, name), shared.slices.home(id));
            let link = || shared.at(at).link(&steps, id, dir, name);
            let mut holds = shared.holds(at);
            let linked = async {
                holds.file(&steps, id).await?;
                shared.taught(&steps, (at, [id, dir]), link).await
            };
            let linked = linked.await;
            let entry = match holds.end(&steps, linked).await {
                // Without a name it is known at its home only.
                Err(error) if error.errno() == Errno::ESTALE && home != at => {
                    drop(steps); // no request waits for a slot while it keeps one
                    if error.is_unmet() && shared.getattr(cx, id).await?.nlink > 0 {
                        return Err(error); // it has one, which is not known here
                    }
                    let link = || shared.at(home).link(cx, id, dir, name);
                    let mut holds = shared.holds(home);
                    let linked = async {
                        holds.name(cx, (dir, name)).await?;
                        shared.taught(cx, (home, [dir]), link).await
                    };
                    let linked = linked.await;
                    let entry = holds.end(cx, linked).await?;
                    shared.looked_up(cx, NameKey::of(dir, name), Ok(&entry));
                    shared.met((dir, name), &entry);
                    return Ok(shared.said_by(home, entry));
                }
                outcome => outcome?,
            };
            shared.looked_up(cx, NameKey::of(dir, name), Ok(&entry));
            shared.met((dir, name), &entry);
            match shared.at_home(&steps, entry, at).await {
                // Removed since: it was there, with these attributes.
                Err(error) if error.errno() == Errno::ESTALE => Ok(shared.said_by(at, entry)),
                outcome => outcome,
            }
        })
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let at = self.shared.opening(id, how);
            let shared = &*self.shared;
            let open = || shared.at(at).open(cx, id, how);
            let file = shared.taught(cx, (at, [id]), open).await?;
            Ok(PlacedFile::open(&self.shared, (at, how), file))
        })
    }

    fn learn<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::ENOTSUP.into()) })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let at = self.shared.slices.name(place.0, place.1);
            if at == self.shared.opening(id, how) {
                let shared = &*self.shared;
                let open = || shared.at(at).open_named(cx, place, id, how);
                let file = shared.taught(cx, (at, [place.0, id]), open).await?;
                return Ok(PlacedFile::open(&self.shared, (at, how), file));
            }
            let shared = &*self.shared;
            let named =
                || -> Fut<'_, Result<()>> { Box::pin(must_be_named(shared.at(at), cx, place, id)) };
            shared.taught(cx, (at, [place.0]), named).await?;
            self.open(cx, id, how).await
        })
    }

    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        if let Some(server) = self.shared.only() {
            return Box::pin(async move {
                let (entry, file) = server.create(cx, dir, name, how).await?;
                Ok((entry, PlacedFile::open(&self.shared, (ONLY, how.open), file)))
            });
        }
        Box::pin(async move {
            // A file that must be new is made once. Another one may be cut in a replay slot at its home, and
            // no request waits for a slot while it keeps one.
            let steps = how.exclusive.then(|| cx.in_steps());
            let cx = steps.as_ref().unwrap_or(cx);
            let at = self.shared.slices.name(dir, name);
            let uncut = CreateHow { open: how.open.without_truncation(), ..how };
            let shared = &*self.shared;
            let key = NameKey::of(dir, name);
            let before = shared.last_found(cx, key);
            let create = || shared.at(at).create(cx, dir, name, uncut);
            let created = shared.taught(cx, (at, [dir]), create).await?;
            shared.looked_up(cx, key, Ok(&created.0));
            shared.met((dir, name), &created.0);
            shared.places.guesses.note(key, shared.slices.home(created.0.id));
            // Of a new file there is nothing to cut, nor of an empty one that somebody else has made since.
            let is_new =
                how.exclusive || before == Some(FoundName::Absent) && created.0.attr.size == 0;
            let cuts = how.open.truncates() && !is_new;
            self.move_home(cx, created, (at, how.open), cuts).await
        })
    }

    /// A file without a name can be used only where it was made. So files are made until one is at home.
    /// The others stay open until then, so that no inode number comes twice. If none is at home, the last
    /// one cannot be given a name.
    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let at = self.shared.slices.directory(dir);
            let server = self.shared.at(at);
            // A request has one open file, so that the others are open by themselves.
            let (beside, again) = (cx.without_request(), how.open.of_created());
            let mut others: Vec<Arc<dyn OpenFile>> = Vec::new();
            let mut tries = TMPFILE_TRIES * self.shared.servers.len();
            let made = loop {
                let make = || server.tmpfile(cx, dir, how);
                let (entry, file) = match self.shared.taught(cx, (at, [dir]), make).await {
                    Ok(made) => made,
                    Err(error) => break Err(error),
                };
                tries -= 1;
                if self.shared.slices.home(entry.id) == at || tries == 0 {
                    break Ok((entry, PlacedFile::open(&self.shared, (at, how.open), file)));
                }
                others.extend(server.open(&beside, entry.id, again).await);
                if let Err(error) = file.close(cx).await {
                    break Err(error);
                }
            };
            let closes = others.iter().map(|file| file.close(&beside)).collect();
            dray_rt::join_all(closes).await; // nobody has used them
            made
        })
    }

    /// In steps: the home of a file that is replaced is known only once it is open.
    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>> {
        Box::pin(put_in_steps(self, cx, (dir, name), mode, data))
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        at_home!(self, cx, id, access(cx, id, want))
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        self.shared.home(self.shared.info.root).statfs(cx)
    }

    /// At every server at once. Errors: the first.
    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let syncs = self.shared.servers.iter().map(|server| server.sync_all(cx)).collect();
            dray_rt::join_all(syncs).await.into_iter().collect()
        })
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        at_home!(self, cx, id, getxattr(cx, id, name))
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        at_home!(self, cx, id, setxattr(cx, id, name, value, how))
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        at_home!(self, cx, id, listxattr(cx, id))
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        at_home!(self, cx, id, removexattr(cx, id, name))
    }
}
