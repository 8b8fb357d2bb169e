//! What a change has other servers hold, where servers lease what they own (ADR 0056).
//!
//! A server recalls from everybody what it changes itself. Some changes are of what other servers own: a rename into a
//! directory of another server, a further name of a file. Their owners are notified before, and lease nothing of it
//! until they are notified that the change is over.

use dray_core::{Context, Errno, Fate, FileId, Fut, HoldNumber, Name, Result};

use super::servers::PlacedServers;
use super::slices::SliceIndex;

/// The holds of one change.
pub(super) struct ChangeHolds<'a> {
    servers: &'a PlacedServers,
    /// The server that carries the change out.
    at: SliceIndex,
    held: Vec<Held<'a>>,
}

struct Held<'a> {
    at: SliceIndex,
    number: HoldNumber,
    id: FileId,
    name: Option<&'a Name>,
}

impl PlacedServers {
    /// The holds of a change that the server `at` carries out. There are none yet.
    pub(super) fn holds(&self, at: SliceIndex) -> ChangeHolds<'_> {
        ChangeHolds { servers: self, at, held: Vec::new() }
    }
}

impl<'a> ChangeHolds<'a> {
    /// Has its server hold a name that changes, and the file that the name leads to.
    pub(super) async fn name(
        &mut self,
        cx: &Context,
        (dir, name): (FileId, &'a Name),
    ) -> Result<()> {
        let servers = self.servers;
        let owner = servers.slices.name(dir, name);
        if owner == self.at || servers.holders.is_empty() {
            return Ok(());
        }
        self.add(cx, owner, (dir, Some(name))).await?;
        // Behind that: who finds another file there from now on does not get it leased by this name.
        match servers.look_at(&cx.only_looking(), owner, (dir, name)).await {
            Ok(entry) => self.add(cx, owner, (entry.id, None)).await,
            Err(error) if error.errno() == Errno::ENOENT => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Has its home hold the attributes of a file that change.
    pub(super) async fn file(&mut self, cx: &Context, id: FileId) -> Result<()> {
        let home = self.servers.slices.home(id);
        match home == self.at || self.servers.holders.is_empty() {
            true => Ok(()),
            false => self.add(cx, home, (id, None)).await,
        }
    }

    async fn add(
        &mut self,
        cx: &Context,
        at: SliceIndex,
        (id, name): (FileId, Option<&'a Name>),
    ) -> Result<()> {
        let number = self.servers.holder(at).hold(cx, id, name).await?;
        self.held.push(Held { at, number, id, name });
        Ok(())
    }

    /// The change has come to its end, as `outcome` says. Where it may come to pass yet, the holds go on for as long
    /// as they may last.
    pub(super) async fn end<T>(self, cx: &Context, outcome: Result<T>) -> Result<T> {
        if self.held.is_empty()
            || outcome.as_ref().is_err_and(|error| error.fate() == Fate::Unknown)
        {
            return outcome;
        }
        let cx = &Context { cancel: None, ..cx.clone() };
        let is_made = outcome.is_ok();
        let ends = self.held.iter().map(|held| -> Fut<'_, Result<()>> {
            Box::pin(self.servers.end_hold(cx, held, is_made))
        });
        let ended = dray_rt::join_all(ends.collect()).await;
        let value = outcome?;
        ended.into_iter().collect::<Result<()>>()?;
        Ok(value)
    }
}

impl PlacedServers {
    /// A hold that has not lasted comes once more, behind the change: who was leased the old state meanwhile gives
    /// it back.
    async fn end_hold(&self, cx: &Context, held: &Held<'_>, is_made: bool) -> Result<()> {
        let holder = self.holder(held.at);
        if holder.release(cx, held.number).await? || !is_made {
            return Ok(());
        }
        let again = holder.hold(cx, held.id, held.name).await?;
        holder.release(cx, again).await.map(drop)
    }
}
