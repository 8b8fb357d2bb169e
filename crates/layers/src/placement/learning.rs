//! Servers that have to learn ids from names: a call that meets a server which has not met its files yet.

use dray_core::{
    Context, DirPage, Entry, Errno, Error, FileId, Fut, Name, NameBuf, OpenFile, OpenHow, Result,
};

use super::places::FilePlace;
use super::servers::PlacedServers;
use super::slices::SliceIndex;

/// Deepest directory whose path is said to a server.
const DEPTH_MAX: usize = 4096;
/// Calls for one file at most: a server that forgets what it has just learned would be asked for ever.
const CALLS_MAX: usize = 4 * DEPTH_MAX;

/// Listings are searched so far for the name of a directory: some 2 million names.
const PAGES_MAX: usize = 1024;
const PAGE_BYTES: usize = 64 << 10;

impl PlacedServers {
    /// Notes a name of a file, if a server may ask for it.
    pub(super) fn met(&self, place: (FileId, &Name), entry: &Entry) {
        if self.learn() {
            self.places.met(place, entry);
        }
    }

    /// The same of a listing.
    pub(super) fn met_all(&self, dir: FileId, page: &DirPage) {
        if !self.learn() {
            return;
        }
        for (name, entry) in page.iter() {
            if let (Ok(name), Some(attr)) = (Name::new(name), entry.attr) {
                self.places.met((dir, name), &Entry { id: entry.id, attr });
            }
        }
    }

    /// Makes a call about `ids` at a server. If the server has not met one of them, it learns where the file
    /// is, and the call is made again. Errors: `ESTALE` if the file has no longer the name that is known here.
    /// The error is unmet if no name is known of the file or of a directory above.
    pub(super) fn taught<'a, T: Send + 'a, const N: usize>(
        &'a self,
        cx: &'a Context,
        (at, ids): (SliceIndex, [FileId; N]),
        call: impl Fn() -> Fut<'a, Result<T>> + Send + 'a,
    ) -> Fut<'a, Result<T>> {
        let first = call();
        if !self.learn() {
            return first;
        }
        Box::pin(async move {
            match first.await {
                Err(error) if error.is_unmet() => {}
                outcome => return outcome,
            }
            for id in ids {
                self.teach(cx, at, id).await?;
            }
            call().await
        })
    }

    /// Tells a server where a file is: by its name, and by those of the directories above that the
    /// server has not met.
    pub(super) async fn teach(&self, cx: &Context, at: SliceIndex, id: FileId) -> Result<()> {
        let mut unmet = vec![id];
        for _ in 0..CALLS_MAX {
            let Some(id) = unmet.last().copied() else { return Ok(()) };
            if id == self.root() {
                return Ok(());
            }
            if unmet.len() > DEPTH_MAX {
                break;
            }
            let place = match self.places.of(id) {
                Some(place) => place,
                None => self.find_directory(cx, at, id).await.ok_or_else(unknown)?,
            };
            let dir = place.dir;
            match self.at(at).learn(cx, (dir, &place.name), id).await {
                Ok(()) => {
                    unmet.pop();
                }
                Err(error) if error.is_unmet() && !unmet.contains(&dir) => unmet.push(dir),
                // Another client may have moved the directory.
                Err(error) => match self.find_directory(cx, at, id).await {
                    Some(other) if other != place => {}
                    _ => return Err(not_taught(error, unmet.len())),
                },
            }
        }
        Err(unknown())
    }

    /// Finds the name of a directory that this client has not met by its name, for the server `at`. Such is the
    /// working directory of a program that is older than this process. The server of the directory's names knows
    /// what is above, and a listing of that has the name. None of what is no directory.
    async fn find_directory(&self, cx: &Context, at: SliceIndex, dir: FileId) -> Option<FilePlace> {
        let knows = self.slices.directory(dir);
        if knows == at || self.places.of(dir).is_some_and(|place| !place.is_dir) {
            return None;
        }
        // The caller may use the directory, and need not be allowed to list what is above.
        let cx = &Context::system().on_behalf_of(cx.origin.node);
        let above = self.at(knows).parent(cx, dir).await.ok()?.id;
        let listing = self.at(knows).open(cx, above, OpenHow::DIRECTORY).await.ok()?;
        let name = name_in(cx, &*listing, dir).await;
        let _ = listing.close(cx).await; // the name counts
        let place = FilePlace { dir: above, name: name?, is_dir: true };
        self.places.insert(dir, place.clone());
        Some(place)
    }

    /// Tells servers that a file or directory was renamed at the server `at`. They may have to find
    /// it before this client uses it again, such as after a restart. What fails is made up for by
    /// the next call.
    pub(super) async fn show_renamed(
        &self,
        cx: &Context,
        (id, place): (FileId, FilePlace),
        at: SliceIndex,
    ) {
        let is_dir = place.is_dir;
        self.places.insert(id, place);
        let home = self.slices.home(id);
        let others = self.indices().filter(|other| *other != at && (is_dir || *other == home));
        let calls =
            others.map(|other| -> Fut<'_, Result<()>> { Box::pin(self.teach(cx, other, id)) });
        dray_rt::join_all(calls.collect()).await;
    }
}

/// The name of an inode in a listing.
async fn name_in(cx: &Context, listing: &dyn OpenFile, id: FileId) -> Option<NameBuf> {
    let mut cookie = 0;
    for _ in 0..PAGES_MAX {
        let page = listing.readdir(cx, cookie, PAGE_BYTES, false).await.ok()?;
        // A listing without attributes has inode numbers alone. Learning compares the rest.
        if let Some((name, _)) = page.iter().find(|(_, entry)| entry.id.ino == id.ino) {
            return Some(Name::new(name).ok()?.to_owned());
        }
        let (_, last) = page.iter().last().filter(|_| !page.end)?;
        cookie = last.cookie;
    }
    None
}

/// Why a server has not learned the last of `unmet` ids, of which the first is that of the file in question.
/// A file that has lost its name may be gone. A directory above it that has lost its name has another one,
/// which is not known here.
fn not_taught(error: Error, unmet: usize) -> Error {
    match error.errno() {
        Errno::ENOTSUP => unknown(),
        Errno::ESTALE if error.is_unmet() || unmet > 1 => unknown(),
        _ => error,
    }
}

/// An `ESTALE` by which the caller's kernel looks the path up again. It must not be taken for a file that is gone.
fn unknown() -> Error {
    Error::new(Errno::ESTALE)
        .because("a server has not met the file, and no name of it is known here")
        .unmet(true)
}
