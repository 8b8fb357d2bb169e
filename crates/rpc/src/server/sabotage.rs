//! The promises that a test breaks in a server on purpose, to prove that the test would notice.
//!
//! The cargo feature `sabotage` belongs to `dray-testkit` and to tests. The shipped program is
//! compiled without it: there [`BrokenPromises`] is empty, and the compiler removes each use of it.

use dray_core::Op;

/// A protection left out, or a promise broken. Nothing but a test sets it.
#[cfg_attr(not(feature = "sabotage"), expect(dead_code, reason = "only tests break anything"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A change that comes again is carried out again: those of this kind, or all.
    ReplyCache(Option<Op>),
    /// A change that was under way when the process died counts as not applied: as above.
    Intents(Option<Op>),
    /// Changes of this kind are answered and not made, now and then. Only kinds whose answer
    /// carries nothing but success: writes, removals, renames, syncs.
    DroppedChanges(Op),
    /// A connection goes on being read when its client has come back on another.
    ConnectionFence,
    /// Locks are granted, though another owner holds them.
    Locks,
    /// Reclaims of locks are answered with success, and the locks are not taken.
    Reclaim,
    /// Files that are closed stay open.
    Closes,
    /// The buffers of reads are not given back, now and then.
    ReadBuffers,
    /// Clients that say goodbye are not let go.
    Goodbyes,
    /// Range grants of changes that a crash cut short are not held for their callers.
    CutShortGrants,
    /// Files that are removed during the recovery window are not held for recovery.
    HeldFiles,
    /// Clients do not learn that the machine has lost power.
    PowerLossNotice,
    /// Changes replayed after a loss of power are answered with success, and not made.
    Replay,
    /// Replayed changes are made in the order of their arrival.
    ReplayOrder,
    /// New calls do not wait for the replay.
    ReplayGate,
    /// The replay ignores durable stamps: it repeats changes older than a synced one.
    ReplayDurableStamps,
    /// Parts of a split read bear one version, even if a write came in between.
    SplitReads,
    /// Reads and writes of the same bytes do not wait for each other.
    RangeLocks,
    /// Changes of rights do not wait for files that were opened ahead.
    OpenAhead,
    /// An open by name opens whichever file has the name now.
    OpenByName,
    /// The last changes of a client are not synced when it leaves.
    LastSync,
    /// Now and then a client that caches an open file is not notified of a change of it.
    Notifications,
    /// An evicted client may start a session again.
    Evictions,
    /// Changes are carried out before a backup has their intents.
    Shipping,
    /// A server goes on answering when its lease has ended.
    ServingLease,
    /// A backup takes notes whatever server epoch they are of.
    Epochs,
    /// A backup counts as in step before it has its copy.
    InStep,
    /// The copy for a backup leaves sessions out.
    Copy,
    /// Answered changes of data are not made again after a takeover.
    AnsweredData,
    /// What is synced counts as on media, up to changes that clients may still ask for again.
    AwaitedStamps,
    /// A recovery that goes on at another server epoch is no further loss to clients.
    RepeatedRecovery,
    /// Leases are not asked back before a change.
    LeaseRecalls,
    /// A change of a name does not ask the attributes of its directory back, which cover the listing.
    LeaseListings,
    /// An answer to a change has the attributes of changed files from before the change.
    LeaseChangedFiles,
    /// What is changed is leased meanwhile.
    LeaseMarks,
    /// A change goes on when a client has not answered in time, and the client keeps its leases.
    LeaseFences,
    /// Changes do not wait for what a server before leased.
    LeaseRestart,
    /// A server leases at once what a server before may have held for changes.
    LeaseRest,
    /// A client with leases is noted as one that has none.
    LeaseNotes,
    /// What another server is about to change is leased all the same.
    LeaseHolds,
    /// What is asked back to make room is leased anew before the client's answer, which takes it.
    LeaseRoom,
    /// A server that forwards answers recalls from above before its own clients have.
    UpperRecalls,
    /// A server that forwards leases what is not leased from above.
    UpperGrants,
    /// A server that forwards answers clients with leases, however long ago it was answered from above.
    UpperContact,
    /// A server that forwards keeps what it has leased when all leases from above have ended.
    UpperEnd,
    /// After its start a server that forwards does not ask clients of before for what is recalled from above.
    UpperRestart,
    /// A server does not recall from one that forwards what it changes for that one by a name.
    UpperNamed,
    /// A recall waits for its client, however long that takes, and now and then the client's answer is not taken.
    RecallEnds,
    /// A file that one client writes under its lease is leased to another one for writing, too.
    SecondWriter,
    /// Write leases are not asked back.
    WriteLeaseRecalls,
    /// Leases on locks are not asked back.
    LockLeaseRecalls,
    /// What a client kept is written whatever the file is by then.
    DirtyOverNewer,
    /// After its start a server does not wait for what clients have kept.
    WriteLeaseRestart,
    /// Disks of clients answer syncs before anything is on media. The server has no part in that: the simulator's disks
    /// do it.
    LocalSyncs,
}

/// The promise that is broken in one server.
#[derive(Clone, Copy, Default)]
pub(crate) struct BrokenPromises {
    #[cfg(feature = "sabotage")]
    pub(crate) what: Option<Sabotage>,
}

impl BrokenPromises {
    /// Whether exactly this is broken.
    pub(crate) fn is(self, what: Sabotage) -> bool {
        self.what() == Some(what)
    }

    /// Whether a change of this kind is carried out whenever it comes.
    pub(crate) fn forgets_answers(self, op: Op) -> bool {
        matches!(self.what(), Some(Sabotage::ReplyCache(which)) if which.is_none_or(|which| which == op))
    }

    /// Whether what was noted of a change of this kind is not looked at.
    pub(crate) fn forgets_intents(self, op: Op) -> bool {
        matches!(self.what(), Some(Sabotage::Intents(which)) if which.is_none_or(|which| which == op))
    }

    /// Whether this call is answered and not carried out.
    pub(crate) fn drops_change(self, op: Op) -> bool {
        self.is(Sabotage::DroppedChanges(op)) && dray_rt::random_u64().is_multiple_of(8)
    }

    /// Whether no client is notified of this change.
    pub(crate) fn drops_notification(self) -> bool {
        self.is(Sabotage::Notifications) && dray_rt::random_u64().is_multiple_of(8)
    }

    #[cfg(feature = "sabotage")]
    fn what(self) -> Option<Sabotage> {
        self.what
    }

    #[cfg(not(feature = "sabotage"))]
    #[inline(always)]
    fn what(self) -> Option<Sabotage> {
        None
    }
}
