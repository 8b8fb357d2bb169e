//! The replay after a loss of power at the server's machine. It sends kept changes again, checks
//! changed names, and reports what is lost. The unsynced log decides; this module makes the calls.

use std::sync::Arc;

use dray_core::{Buf, Context, Errno, FileId, OpenHow, Result};

use crate::client::channel::{Channel, OutgoingCall, value_of};
use crate::client::durability::{DurableStamp, DurableStamps, ExpectedName, KeptChange};
use crate::client::holdings::tickets::{ReopenRequest, reopen};
use crate::client::link::{Link, SessionState};
use crate::wire::{Call, FileDurableStamp, Input, Ticket, Wire, put_durable_stamp};

/// Files named in one message.
const STAMPS_OF_ONE_MESSAGE: usize = 1024;

/// A replay, with the server epoch that it is about.
pub(crate) struct Replay {
    link: Arc<Link>,
    channel: Arc<Channel>,
    session_state: SessionState,
}

/// The server has gone meanwhile: the next one begins a replay of its own.
struct ServerGone;

impl Replay {
    /// A replay to a server that waits for it, in place of the replay before. None if yet another
    /// epoch of the server has been met. It has a connection of its own, so that it does not wait
    /// behind calls of the other channels.
    pub(crate) fn begin(link: &Arc<Link>, session_state: SessionState) -> Option<Replay> {
        let channel = Channel::for_replay(link.closing.clone(), link.leases.clone());
        let begins = link.begin_replay(&channel, session_state);
        begins.then(|| Replay { link: link.clone(), channel, session_state })
    }

    /// Replays, and reports what is lost.
    pub(crate) async fn run(self) {
        if self.is_over() {
            return;
        }
        self.link.connect_another(self.channel.clone());
        self.link.unsynced.replay_begins();
        let _ = self.carry_out().await; // the next one takes over
        self.channel.shut();
    }

    /// Whether another epoch of the server has been met.
    fn is_over(&self) -> bool {
        self.link.server().session_state() != self.session_state
    }

    async fn carry_out(&self) -> std::result::Result<(), ServerGone> {
        let unsynced = &self.link.unsynced;
        match self.declare().await? {
            Ok(()) => {
                self.send_all().await?;
                self.check_names().await?;
                unsynced.replay_ends(None);
            }
            Err(error) => unsynced.replay_ends(Some(&error.to_string())),
        }
        self.link.note_replayed();
        let instance = self.session_state.instance;
        // With what is lost, for the server's metrics.
        let losses = unsynced.unreported_losses();
        let (newest, durable_stamp) = losses;
        let done = Call::Recover { instance, newest, durable_stamp, durable_stamps: &[], step: 2 };
        if self.call::<()>(&Context::system(), &done, None).await?.is_ok() {
            unsynced.losses_reported(losses);
        }
        Ok(())
    }

    /// An answer of this epoch of the server.
    async fn call<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: &Call<'_>,
        data: Option<Buf>,
    ) -> std::result::Result<Result<T>, ServerGone> {
        let mut ask = OutgoingCall { data, ..OutgoingCall::of(cx, call) };
        let outcome = self.channel.call(&mut ask, |bytes| Input::whole(bytes)).await;
        if self.is_over() { Err(ServerGone) } else { Ok(value_of(outcome)) }
    }

    /// Declares what is on media, and waits until all clients have.
    async fn declare(&self) -> std::result::Result<Result<()>, ServerGone> {
        let durable = self.link.unsynced.durable_stamps();
        let files: Vec<_> = durable.files.iter().map(|(file, stamp)| (*file, *stamp)).collect();
        let mut pieces = files.chunks(STAMPS_OF_ONE_MESSAGE).peekable();
        loop {
            let piece = pieces.next().unwrap_or_default();
            let last = pieces.peek().is_none();
            let outcome = self.declare_piece(&durable, piece, last).await?;
            if last || outcome.is_err() {
                return Ok(outcome);
            }
        }
    }

    async fn declare_piece(
        &self,
        durable: &DurableStamps,
        piece: &[(FileId, DurableStamp)],
        last: bool,
    ) -> std::result::Result<Result<()>, ServerGone> {
        let (instance, cx) = (self.session_state.instance, Context::system());
        let mut durable_stamps = Vec::new();
        let DurableStamp { number: durable_stamp, ticket } = durable.all;
        if self.link.server().tickets {
            for (file, DurableStamp { number: stamp, ticket }) in piece.iter().copied() {
                // A server of an earlier version gave none, and this one believes only tickets.
                if let Some(ticket) = ticket {
                    put_durable_stamp(
                        &FileDurableStamp { file, stamp, ticket },
                        &mut durable_stamps,
                    );
                }
            }
            let durable_stamp = if ticket.is_some() { durable_stamp } else { 0 };
            let ticket = ticket.unwrap_or(Ticket([0; Ticket::BYTES]));
            let call = Call::Declare {
                instance,
                durable_stamp,
                ticket,
                durable_stamps: &durable_stamps,
                last,
            };
            return self.call(&cx, &call, None).await;
        }
        piece.iter().for_each(|(file, stamp)| (*file, stamp.number).put(&mut durable_stamps));
        let (newest, step) = (durable.newest, u8::from(last));
        let call = Call::Recover {
            instance,
            newest,
            durable_stamp,
            durable_stamps: &durable_stamps,
            step,
        };
        self.call(&cx, &call, None).await
    }

    async fn send_all(&self) -> std::result::Result<(), ServerGone> {
        let unsynced = &self.link.unsynced;
        loop {
            // More may have come: answers that were on their way.
            let files = unsynced.files_to_replay();
            if files.is_empty() {
                return Ok(());
            }
            for file in files {
                match self.send_file(file).await? {
                    Ok(()) => {}
                    Err(error) if error.errno() == Errno::ESTALE => unsynced.file_gone(file),
                    Err(error) => {
                        let why = format!("it could not be sent again: {error}");
                        unsynced.file_lost(file, &why);
                    }
                }
            }
        }
    }

    async fn send_file(&self, id: FileId) -> std::result::Result<Result<()>, ServerGone> {
        let (system, handle) = (Context::system(), self.link.own_handle());
        if let Err(error) = self.open(id, handle).await? {
            return Ok(Err(error));
        }
        let (mut outcome, mut from) = (Ok(()), 0);
        while outcome.is_ok()
            && let Some((index, kept)) = self.link.unsynced.next_to_replay(id, from)
        {
            outcome = self.send(handle, &kept).await?;
            if outcome.is_ok() {
                self.link.unsynced.replayed(id, index, &kept);
            }
            from = index;
        }
        // The changes that were sent count, however the close goes.
        let _ = self.call::<()>(&system, &Call::Close { handle }, None).await?;
        Ok(outcome)
    }

    /// Opens a file to make its changes again. Without a ticket, as where a path was given
    /// another mode or owner, the rights of the user that changed it decide.
    async fn open(&self, id: FileId, handle: u64) -> std::result::Result<Result<()>, ServerGone> {
        let ticket = self.link.unsynced.ticket(id);
        let mut cx = Context::system();
        if ticket.is_none()
            && let Some((_, kept)) = self.link.unsynced.next_to_replay(id, 0)
        {
            cx.who = kept.who;
        }
        let reads = ticket.is_some_and(|ticket| ticket.access() & Ticket::WRITE == 0);
        let modes = if reads { &[libc::O_RDONLY][..] } else { &[libc::O_WRONLY, libc::O_RDONLY] };
        let mut outcome = Ok(());
        for flags in modes {
            let file = ReopenRequest { id, how: OpenHow::new(*flags), handle, ticket };
            outcome = reopen(&self.channel, &cx, file).await.map(drop);
            if self.is_over() {
                return Err(ServerGone);
            }
            if outcome.as_ref().is_ok_and(|()| true) || ticket.is_some() {
                break;
            }
        }
        Ok(outcome)
    }

    async fn send(
        &self,
        handle: u64,
        kept: &KeptChange,
    ) -> std::result::Result<Result<()>, ServerGone> {
        let mut cx = Context::system();
        cx.who = kept.who.clone();
        let call = Call::Redo { handle, stamp: kept.number(), change: kept.change };
        self.call(&cx, &call, kept.data.clone()).await
    }

    /// Names are not made again: what the loss of power undid is reported.
    async fn check_names(&self) -> std::result::Result<(), ServerGone> {
        for (dir, name, expected) in self.link.unsynced.names_to_verify() {
            let call = Call::Lookup { dir, name: &name };
            let found = self.call::<dray_core::Entry>(&Context::system(), &call, None).await?;
            if let Some(why) = undone(expected, found.map(|entry| entry.id)) {
                self.link.unsynced.name_lost(dir, &name, why);
            }
        }
        Ok(())
    }
}

/// The reason why a name is not as expected, if it is not.
fn undone(expected: ExpectedName, found: Result<FileId>) -> Option<&'static str> {
    match (expected, found) {
        (ExpectedName::Unknown, _) => Some("it may have been undone: two names had changed places"),
        (ExpectedName::File(id), Ok(found)) if id == found => None,
        (ExpectedName::File(_), Ok(_)) => Some("another file has the name"),
        (ExpectedName::AnyFile, Ok(_)) => None,
        (ExpectedName::File(_) | ExpectedName::AnyFile, Err(_)) => {
            Some("no file has the name any more")
        }
        (ExpectedName::Absent, Ok(_)) => Some("what had been removed or renamed is back"),
        (ExpectedName::Absent, Err(_)) => None,
    }
}
