//! A sync of everything that failed: it does not say for which files. Each is synced by itself then,
//! through an open file of its own, to which the server's kernel tells what it has told nobody else
//! (`errseq_sample` in lib/errseq.c). What is not on media is told as a loss.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{Context, Errno, Error, Fate, FileId, OpenHow};

use super::{OfFile, State, Unsynced};
use crate::client::channel::{Answer, Ask, Failure};
use crate::client::holdings::tickets::{Reopened, reopen};
use crate::client::session::Session;
use crate::wire::{Call, Input, Ticket};

/// How long is waited for a server that cannot be asked.
const RETRY_TIME: Duration = Duration::from_secs(1);

impl Unsynced {
    /// A sync of everything has failed. True as with [`Unsynced::changed`].
    pub(crate) fn doubt(&self) -> bool {
        let mut state = self.lock();
        state.doubtful = true;
        state.tender.call(false, true)
    }

    /// Whether one has, and not each file has been looked at since.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.lock().doubtful
    }

    fn files_in_doubt(&self) -> Vec<FileId> {
        let state = self.lock();
        let unsynced = |(_, file): &(&FileId, &OfFile)| !file.is_clean();
        state.files.iter().filter(unsynced).map(|(id, _)| *id).collect()
    }

    /// A file could not be brought to media, and its writers are to be told.
    fn sync_failed(&self, id: FileId, why: &str) {
        let mut state = self.lock();
        let State { files, losses, .. } = &mut *state;
        let Some(file) = files.get_mut(&id) else { return };
        let number = losses.report(Some(id), "changes of a file", why, file.unsynced_bytes());
        if file.writers > 0 {
            file.lost = number;
        }
        self.note_alert(&state);
    }

    /// Each file that is noted has been looked at.
    fn doubt_ends(&self) {
        let mut state = self.lock();
        state.doubtful = false;
        if state.beyond.take().is_some() {
            let why = "a sync of everything failed, and they were not noted";
            state.losses.report(None, "changes of further files", why, 0);
        }
    }
}

/// What came of the sync of one file.
enum Synced {
    Yes,
    /// It is not there any more.
    Gone,
    No(Error),
    /// The server cannot be asked now.
    Later,
}

impl Session {
    /// Looks which files a failed sync of everything has left out.
    pub(super) async fn look_at_each(self: &Arc<Session>) {
        let unsynced = &self.link.unsynced;
        for id in unsynced.files_in_doubt() {
            loop {
                if !self.link.is_wanted() || !unsynced.is_doubtful() {
                    return; // over, or a loss of power has been told
                }
                match self.sync_one(id).await {
                    Synced::Yes | Synced::Gone => break,
                    Synced::No(error) => {
                        let why = format!("the server cannot bring it to media: {error}");
                        unsynced.sync_failed(id, &why);
                        break;
                    }
                    Synced::Later => dray_rt::sleep(RETRY_TIME).await,
                }
            }
        }
        unsynced.doubt_ends();
    }

    async fn sync_one(self: &Arc<Session>, id: FileId) -> Synced {
        let (handle, cx) = (self.link.own_handle(), Context::system());
        let Ok(channel) = self.channel() else { return Synced::Later };
        let ticket = self.link.unsynced.ticket(id);
        let reads = ticket.is_some_and(|ticket| ticket.access() & Ticket::WRITE == 0);
        let ways = if reads { &[libc::O_RDONLY][..] } else { &[libc::O_WRONLY, libc::O_RDONLY] };
        let mut opened = Ok(None);
        for flags in ways {
            let file = Reopened { id, how: OpenHow::new(*flags), handle, ticket };
            opened = reopen(&channel, &cx, file).await;
            if opened.is_ok() {
                break;
            }
        }
        match opened {
            Ok(_) => {}
            Err(error) if error.fate() != Fate::Final => return Synced::Later,
            Err(error) if error.errno() == Errno::EIO => return Synced::No(error),
            Err(error) => {
                // A special file, say, or one that was removed.
                log::debug!("file {id} cannot be synced by itself: {error}");
                return Synced::Gone;
            }
        }
        let call = Call::Sync { handle, data_only: false };
        let synced = channel.call(Ask::of(&cx, &call), |bytes| Input::whole::<()>(bytes)).await;
        self.link.close_later(self, handle);
        match synced {
            Ok(Answer { made, .. }) => {
                self.link.unsynced.synced(id, made);
                Synced::Yes
            }
            Err((Failure::Error(error), _)) if error.fate() == Fate::Final => Synced::No(error),
            Err(_) => Synced::Later,
        }
    }
}
