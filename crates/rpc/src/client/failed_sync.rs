//! A sync of everything that failed does not say for which files. Each file is synced by itself
//! then, through an open file of its own. The server's kernel reports a failure to such an open
//! file, if it has reported it to no other (`errseq_sample` in lib/errseq.c). Data that are not on
//! media are reported as a loss.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{Context, Errno, Error, Fate, FileId, OpenHow};

use crate::client::channel::{CallAnswer, CallFailure, OutgoingCall};
use crate::client::holdings::tickets::{ReopenRequest, reopen};
use crate::client::session::ClientSession;
use crate::wire::{Call, Input, Ticket};

/// How long the client waits for a server that cannot be asked.
const RETRY_TIME: Duration = Duration::from_secs(1);

/// The result of the sync of one file.
enum FileSync {
    Done,
    /// The file does not exist any more, or has nothing to sync.
    NoFile,
    Failed(Error),
    /// The server cannot be asked now.
    Unanswered,
}

impl ClientSession {
    /// Finds out which files a failed sync of everything has left out.
    pub(super) async fn sync_each_file(self: &Arc<ClientSession>) {
        let unsynced = &self.link.unsynced;
        for id in unsynced.files_to_sync() {
            loop {
                if !self.link.is_wanted() || !unsynced.has_failed_sync() {
                    return; // the session is over, or the server lost power
                }
                match self.sync_file(id).await {
                    FileSync::Done | FileSync::NoFile => break,
                    FileSync::Failed(error) => {
                        let why = format!("the server cannot bring it to media: {error}");
                        unsynced.file_sync_failed(id, &why);
                        break;
                    }
                    FileSync::Unanswered => dray_rt::sleep(RETRY_TIME).await,
                }
            }
        }
        unsynced.failed_sync_resolved();
    }

    async fn sync_file(self: &Arc<ClientSession>, id: FileId) -> FileSync {
        let (handle, cx) = (self.link.own_handle(), Context::system());
        let Ok(channel) = self.channel() else { return FileSync::Unanswered };
        let ticket = self.link.unsynced.ticket(id);
        let reads = ticket.is_some_and(|ticket| ticket.access() & Ticket::WRITE == 0);
        let modes = if reads { &[libc::O_RDONLY][..] } else { &[libc::O_WRONLY, libc::O_RDONLY] };
        let mut opened = Ok(None);
        for flags in modes {
            let file = ReopenRequest { id, how: OpenHow::new(*flags), handle, ticket };
            opened = reopen(&channel, &cx, file).await;
            if opened.is_ok() {
                break;
            }
        }
        match opened {
            Ok(_) => {}
            Err(error) if error.fate() != Fate::Final => return FileSync::Unanswered,
            Err(error) if error.errno() == Errno::EIO => return FileSync::Failed(error),
            Err(error) => {
                // A special file, say, or one that was removed.
                log::debug!("file {id} cannot be synced by itself: {error}");
                return FileSync::NoFile;
            }
        }
        let call = Call::Sync { handle, data_only: false };
        let synced = channel
            .call(&mut OutgoingCall::of(&cx, &call), |bytes| Input::whole::<()>(bytes))
            .await;
        self.link.close_later(self, handle);
        match synced {
            Ok(CallAnswer { made, .. }) => {
                self.link.unsynced.sync_answered(id, made.confirmation());
                FileSync::Done
            }
            Err((CallFailure::Error(error), _)) if error.fate() == Fate::Final => {
                FileSync::Failed(error)
            }
            Err(_) => FileSync::Unanswered,
        }
    }
}
