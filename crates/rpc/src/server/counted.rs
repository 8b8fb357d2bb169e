//! The memory that a server keeps for a client on the heap, and how it is counted within the
//! client's share of the buffers.
//!
//! Each connection has a little that is not counted, so that the usual call costs nothing. These
//! are heads of [`HEAD_FREE_BYTES`], [`CALLS_FREE`] calls that wait, and [`CALLERS_FREE_BYTES`] of
//! callers.

use dray_core::{Fut, Result};
use dray_fabric::HEAD_MAX_BYTES;

use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::wire::ReplyHead;

/// Heads of messages up to this size are not counted.
pub(crate) const HEAD_FREE_BYTES: usize = 512;
/// Calls under way on a connection that are not counted.
pub(crate) const CALLS_FREE: u32 = 4;
/// The cost of a further call besides its message: its future, its tasks, its note for the status.
pub(crate) const CALL_BYTES: usize = 8 << 10;
/// Callers of a connection up to this size are not counted.
pub(crate) const CALLERS_FREE_BYTES: usize = 16 << 10;

/// Asks for what may be long, and counts it until it has been sent. Where there is no room it is
/// let go, and asked for again when there is: nobody keeps it meanwhile.
pub(crate) async fn answer<'a>(
    session: &ServerSession,
    ask: impl Fn() -> Fut<'a, Result<Vec<u8>>> + Send,
) -> Result<Reply> {
    let value = ask().await?;
    let bytes = message_bytes(&value);
    let reply = Reply::success(value);
    if bytes <= HEAD_FREE_BYTES {
        return Ok(reply);
    }
    if let Some(charge) = session.buffers.try_charge(bytes) {
        return Ok(reply.counted(charge));
    }
    drop(reply);
    let mut charge = session.buffers.charge(HEAD_MAX_BYTES).await;
    let value = ask().await?;
    charge.resize(message_bytes(&value).min(HEAD_MAX_BYTES));
    Ok(Reply::success(value).counted(charge))
}

/// The size of an answer with this value, bytes.
fn message_bytes(value: &[u8]) -> usize {
    ReplyHead::BYTES_MAX + size_of::<u32>() + value.len()
}
