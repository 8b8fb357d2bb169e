//! Carries out a call about what is on media: a sync of everything, and what clients say
//! after a loss of power.

use dray_core::{Context, Errno, Error, Result};

use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::ServerSession;
use crate::wire::{FileDurableStamp, Stamp, Ticket, get_durable_stamps};

/// A client's statement of what is on media.
pub(super) struct Declaration<'a> {
    /// Everything up to this stamp, and the ticket that says so.
    pub(super) durable_stamp: (u64, Ticket),
    /// [`FileDurableStamp`]s of files of which more is, encoded.
    pub(super) durable_stamps: &'a [u8],
    /// Nothing follows.
    pub(super) last: bool,
}

/// The statement of a client of an earlier version, and its end of sending: `step` 2. Errors:
/// `ESTALE`, it is meant for an earlier server.
pub(super) async fn recover(
    server: &Inner,
    session: &ServerSession,
    instance: u64,
    (newest, durable_stamp, step): (u64, u64, u8),
) -> Result<Reply> {
    check_instance(session, instance)?;
    if step == 2 {
        let (losses, lost_bytes) = (newest, durable_stamp);
        session.export.recovery.tally.lost(losses, lost_bytes);
        session.export.recovery.done(session.id);
        return Ok(Reply::success(()));
    }
    // The client waits with the others, but nobody has sealed what it says is on media. It could
    // say so to have others' changes left out.
    declare_durable_stamps(server, session, (0, &[]), step == 1).await
}

/// The statement of what a client knows. Errors: `ESTALE`, it is meant for an earlier server;
/// `EPROTO`.
pub(super) async fn declare(
    server: &Inner,
    session: &ServerSession,
    instance: u64,
    known: Declaration<'_>,
) -> Result<Reply> {
    check_instance(session, instance)?;
    let durable_stamps =
        get_durable_stamps(known.durable_stamps).map_err(|_| Error::new(Errno::EPROTO))?;
    let (durable_stamp, durable_stamps) = sealed(session, known.durable_stamp, durable_stamps);
    declare_durable_stamps(server, session, (durable_stamp, &durable_stamps), known.last).await
}

fn check_instance(session: &ServerSession, instance: u64) -> Result<()> {
    match instance == session.export.instance {
        true => Ok(()),
        false => Err(Error::new(Errno::ESTALE).because("meant for an earlier server")),
    }
}

pub(super) async fn sync_all(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
) -> Result<Reply> {
    let export = &session.export;
    let synced = export.sync_all(cx).await;
    if let Some(error) = session.sync_failure(cx.origin.request.0) {
        return Err(error);
    }
    let stamp = synced?;
    let ticket = export.tickets.on_media(None, stamp);
    session.note_durable_reported(stamp); // by the answer
    server.notify_durable(export, stamp, ticket);
    let mut reply = Reply::success(()).with_ticket(Some(ticket));
    if session.stamps() {
        reply.stamp(Stamp { number: stamp, at: Stamp::NOWHERE });
    }
    Ok(reply)
}

/// The part of the statement that this server or one before it has made.
fn sealed(
    session: &ServerSession,
    (durable_stamp, ticket): (u64, Ticket),
    mut durable_stamps: Vec<FileDurableStamp>,
) -> (u64, Vec<FileDurableStamp>) {
    let tickets = &session.export.tickets;
    let said = durable_stamps.len();
    durable_stamps.retain(|durable_stamp| {
        tickets.was_on_media(durable_stamp.ticket, Some(durable_stamp.file), durable_stamp.stamp)
    });
    let known = durable_stamp == 0 || tickets.was_on_media(ticket, None, durable_stamp);
    let forged = said - durable_stamps.len() + usize::from(!known);
    if forged > 0 {
        let host = &session.host;
        session.forged_seals.say(|more| {
            log::warn!(
                "{host}: says {forged} times of something that it is on media, and this server \
                 never did: not believed{more}"
            );
        });
    }
    (if known { durable_stamp } else { 0 }, durable_stamps)
}

/// The statement of what a client knows after a loss of power. With the last part of it, the client
/// waits for the others.
async fn declare_durable_stamps(
    server: &Inner,
    session: &ServerSession,
    (durable_stamp, durable_stamps): (u64, &[FileDurableStamp]),
    last: bool,
) -> Result<Reply> {
    session.export.recovery.admit(session.id)?;
    if !server.options.broken().is(Sabotage::ReplayDurableStamps) {
        session.export.replayed.declare(session.id, durable_stamp, durable_stamps)?;
    }
    if last {
        session.export.recovery.declare(session.id).await?;
    }
    Ok(Reply::success(()))
}
