//! The servers of a projection, with the questions that a call on a name has for them.

use std::sync::Arc;

use dray_core::{
    Attr, Context, Entry, Errno, Error, FileId, FileSystem, FileType, FsInfo, Fut, HoldLeases,
    Name, OpenHow, RenameHow, Result,
};

use super::last_lookups::NameKey;
use super::places::{FilePlace, FilePlaces};
use super::slices::{SliceIndex, Slices};

/// The server of a projection that has one.
pub(super) const ONLY: SliceIndex = SliceIndex(0);

/// The servers of a projection, and the mapping that chooses between them. With failover each slice counts as
/// a server.
pub(super) struct PlacedServers {
    pub(super) slices: Slices,
    /// One for each slice.
    pub(super) servers: Vec<Arc<dyn FileSystem>>,
    pub(super) info: FsInfo,
    pub(super) places: Arc<FilePlaces>,
    /// One for each, if the servers lease what they own.
    pub(super) holders: Vec<Arc<dyn HoldLeases>>,
}

impl PlacedServers {
    pub(super) fn at(&self, SliceIndex(index): SliceIndex) -> &dyn FileSystem {
        &*self.servers[usize::from(index)]
    }

    pub(super) fn holder(&self, SliceIndex(index): SliceIndex) -> &dyn HoldLeases {
        &*self.holders[usize::from(index)]
    }

    /// The attributes of a file that its home has leased to this client.
    pub(super) fn leased(&self, id: FileId) -> Option<Attr> {
        let SliceIndex(home) = self.slices.home(id);
        self.holders.get(usize::from(home))?.leased(id)
    }

    pub(super) fn root(&self) -> FileId {
        self.info.root
    }

    pub(super) fn indices(&self) -> impl Iterator<Item = SliceIndex> {
        self.slices.all()
    }

    /// Whether servers may have to learn ids from names.
    pub(super) fn learn(&self) -> bool {
        self.info.learns_ids()
    }

    /// The server of a projection that has one, and whose ids need not be learned. No call concerns another server,
    /// so calls are passed on as they are. None of several.
    pub(super) fn only(&self) -> Option<&dyn FileSystem> {
        match (self.slices.count(), self.learn()) {
            (1, false) => Some(self.at(ONLY)),
            _ => None,
        }
    }

    /// The server where a file is used: its content, its attributes and its locks.
    pub(super) fn home(&self, id: FileId) -> &dyn FileSystem {
        self.at(self.slices.home(id))
    }

    /// The attributes of a file at its home.
    pub(super) fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        self.taught(cx, (self.slices.home(id), [id]), move || self.home(id).getattr(cx, id))
    }

    /// The regular file of this name, which may be about to lose the name. It is looked up, if the caller has not
    /// just done that.
    pub(super) async fn file_named(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
    ) -> Option<FileId> {
        if let Some(found) = self.last_found(cx, NameKey::of(dir, name)) {
            return found.file();
        }
        let at = self.slices.name(dir, name);
        let entry = self.look_at(&cx.only_looking(), at, (dir, name)).await.ok()?;
        (entry.attr.file_type() == FileType::Regular).then_some(entry.id)
    }

    /// What a rename is about to move, with its next name, if servers have to learn of it.
    pub(super) async fn about_to_move(
        &self,
        cx: &Context,
        at: SliceIndex,
        (from, to): ((FileId, &Name), (FileId, &Name)),
        how: RenameHow,
    ) -> Vec<(FileId, FilePlace)> {
        let mut moved = Vec::new();
        if !self.learn() {
            return moved;
        }
        let exchanged = match how {
            RenameHow::Exchange => Some((to, from)),
            RenameHow::Replace | RenameHow::NoReplace => None,
        };
        for (old, (dir, name)) in [Some((from, to)), exchanged].into_iter().flatten() {
            if let Ok(entry) = self.look_at(cx, at, old).await {
                moved.push((entry.id, FilePlace::of((dir, name), &entry)));
            }
        }
        moved
    }

    /// What a rename has moved, if that could not be found before: a process before us had moved it, and has
    /// died.
    pub(super) async fn has_moved(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
    ) -> Option<(FileId, FilePlace)> {
        if !self.learn() {
            return None;
        }
        let at = self.slices.name(dir, name);
        let entry = self.look_at(cx, at, (dir, name)).await.ok()?;
        Some((entry.id, FilePlace::of((dir, name), &entry)))
    }

    /// The server that takes a name away, which `file` may lose: that of the name. With failover it is the
    /// file's home. Only that one knows whether the file is open, and has to be kept for its successor.
    pub(super) fn removing(&self, named: SliceIndex, file: Option<FileId>) -> SliceIndex {
        match file {
            Some(id) if self.slices.placement().fails_over() && !self.learn() => {
                self.slices.home(id)
            }
            _ => named,
        }
    }

    /// Whether a removal of the name concerns one server only. The server `removing` carries it out, `named` has the
    /// name, and `file` may lose it.
    pub(super) fn stays(
        &self,
        (removing, named): (SliceIndex, SliceIndex),
        file: Option<FileId>,
    ) -> bool {
        removing == named && file.is_none_or(|id| self.slices.home(id) == removing)
    }

    /// Has the home of `file`, and the server of the name, see that the server `removing` has taken the name
    /// from it. Without a name the home frees its space, or keeps it for the clients that have it open.
    pub(super) async fn show_removed(
        &self,
        cx: &Context,
        file: Option<FileId>,
        (removing, named): (SliceIndex, SliceIndex),
    ) {
        let Some(id) = file else { return };
        let home = self.slices.home(id);
        // ESTALE if nobody has it open.
        if home != removing {
            let _ = self.getattr(cx, id).await;
        }
        if named != removing {
            let _ = self.taught(cx, (named, [id]), || self.at(named).getattr(cx, id)).await;
        }
    }

    /// The server where a file or directory is opened.
    pub(super) fn opening(&self, id: FileId, how: OpenHow) -> SliceIndex {
        match how.directory() {
            true => self.slices.directory(id),
            false => self.slices.home(id),
        }
    }
}

impl PlacedServers {
    /// An entry as the server `at` has answered it, without what only the file's home may say: for how long its
    /// attributes may be believed.
    pub(super) fn said_by(&self, at: SliceIndex, mut entry: Entry) -> Entry {
        if self.slices.home(entry.id) != at {
            entry.attr.validity.attributes = None;
        }
        entry
    }
}

/// Whether a server says that a file is gone. Of a file that nobody can show to the server this says nothing.
pub(super) fn is_gone(error: &Error) -> bool {
    error.errno() == Errno::ESTALE && !error.is_unmet()
}

/// Makes a call at a file's home.
macro_rules! at_home {
    ($self:ident, $cx:ident, $id:ident, $method:ident($($argument:expr),*)) => {{
        let shared = &*$self.shared;
        let call = move || shared.home($id).$method($($argument),*);
        shared.taught($cx, (shared.slices.home($id), [$id]), call)
    }};
}

pub(super) use at_home;
