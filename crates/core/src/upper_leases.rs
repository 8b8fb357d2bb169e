//! What servers above lease to a file system that is their client, for a server that leases it on (ADR 0061).

use std::time::Duration;

use crate::{Fut, HearRecalls};

/// The leases of a file system that is a client of a server. Its answers say what is leased: each time in their
/// [`Validity`](crate::Validity) is a lease, and so is that of an absence. The methods may be called on any thread.
pub trait UpperLeases: Send + Sync {
    /// How long leases hold after a call that was answered; zero: nothing is leased that may be leased on.
    fn term(&self) -> Duration;

    /// How long what is leased holds from now on, if nothing more is answered; zero: it does not hold.
    fn rest(&self) -> Duration;

    /// Calls the server above. When that is answered, leases hold for a term from the call on. It also ends if the
    /// session has ended.
    fn renew(&self) -> Fut<'_, ()>;

    /// Calls `hear` with each recall, before the server above hears that it is done. Recalls that have come for a
    /// process before this one are among them. The first `hear` stays.
    fn pass_recalls_to(&self, hear: HearRecalls);
}
