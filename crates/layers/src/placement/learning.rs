//! Servers that have to learn ids from names: a call that meets a server which has not met its files yet.

use dray_core::{Context, DirPage, Entry, Errno, Error, FileId, Fut, Name, Result};

use super::fs::PlacedServers;
use super::places::FilePlace;
use super::slices::SliceIndex;

/// Deepest directory whose path is said to a server.
const DEPTH_MAX: usize = 4096;
/// Calls for one file at most: a server that forgets what it has just learned would be told for ever.
const CALLS_MAX: usize = 4 * DEPTH_MAX;

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

    /// Makes a call about `ids` at a server. If the server has not met one of them, it is told where the file
    /// is, and the call is made again. Errors: `ESTALE` if no name is known here, or the name is an old one.
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
            let place = self.places.of(id).filter(|_| unmet.len() <= DEPTH_MAX);
            let FilePlace { dir, name, .. } = place.ok_or_else(unknown)?;
            match self.at(at).learn(cx, (dir, &name), id).await {
                Ok(()) => {
                    unmet.pop();
                }
                Err(error) if error.is_unmet() && !unmet.contains(&dir) => unmet.push(dir),
                Err(error) if error.errno() == Errno::ENOTSUP => return Err(unknown()),
                Err(error) => return Err(error.unmet(false)),
            }
        }
        Err(unknown())
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

fn unknown() -> Error {
    Error::new(Errno::ESTALE)
        .because("a server has not met the file, and no name of it is known here")
}
