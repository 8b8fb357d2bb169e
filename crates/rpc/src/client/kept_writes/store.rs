//! Where kept writes are noted, for a process that follows this one. It is the memory of the session, or a log on the local
//! disk, which outlives the machine's power, too.

use std::sync::OnceLock;
use std::time::Duration;

use dray_core::{FileId, RequestId};

use super::unsent::UnsentBatch;
use super::{BATCH_MAX_BYTES, KEPT_MAX_TIME, SESSION_MAX_BYTES, WRITE_MAX_BYTES};
use crate::client::dirty_log::{
    DirtyLog, DirtyLogIdentity, LoggedRange, RECORD_MAX_BYTES, SendingRecord, SentRecord,
    WriteBackOptions, WriteRecord,
};
use crate::client::memory::{KeptPlace, KeptPlaces, KeptRecord, NotedFile};
use crate::client::session::ClientSession;
use crate::wire::WriteBase;

/// Where all kept writes of a session are noted.
pub(super) enum KeptStore {
    Places(KeptPlaces),
    Log(Box<LogStore>),
}

pub(super) struct LogStore {
    pub(super) log: DirtyLog,
    identity: OnceLock<DirtyLogIdentity>,
    bytes_max: usize,
    age_max: Duration,
}

/// What is kept at most.
#[derive(Clone, Copy)]
pub(super) struct KeepLimits {
    pub(super) write_bytes: usize,
    pub(super) batch_bytes: usize,
    pub(super) session_bytes: usize,
    pub(super) time: Duration,
}

/// A place in memory, and the number of the open file there.
pub(super) type KeptFilePlace = Option<(KeptPlace, u64)>;

impl LogStore {
    pub(super) fn new(options: &WriteBackOptions, log: DirtyLog) -> LogStore {
        let bytes_max = usize::try_from(options.bytes_max).unwrap_or(usize::MAX);
        LogStore { log, identity: OnceLock::new(), bytes_max, age_max: options.age_max }
    }

    fn identity(&self, session: &ClientSession) -> &DirtyLogIdentity {
        self.identity.get_or_init(|| identity_of(session))
    }
}

/// Which files a session is about.
pub(super) fn identity_of(session: &ClientSession) -> DirtyLogIdentity {
    let (info, export) = (session.info(), session.link.options.export.clone());
    DirtyLogIdentity { uuid: info.uuid, root: info.root, export }
}

impl KeptStore {
    pub(super) fn limits(&self) -> KeepLimits {
        match self {
            KeptStore::Places(_) => KeepLimits {
                write_bytes: WRITE_MAX_BYTES,
                batch_bytes: usize::MAX,
                session_bytes: SESSION_MAX_BYTES,
                time: KEPT_MAX_TIME,
            },
            KeptStore::Log(store) => KeepLimits {
                write_bytes: RECORD_MAX_BYTES,
                batch_bytes: BATCH_MAX_BYTES,
                session_bytes: store.bytes_max,
                time: store.age_max,
            },
        }
    }

    /// The log. None: what is kept is sent with the close, and is not on media.
    pub(super) fn log(&self) -> Option<&DirtyLog> {
        match self {
            KeptStore::Places(_) => None,
            KeptStore::Log(store) => Some(&store.log),
        }
    }

    /// Notes a write before it is kept. None: it may not be kept. Else where it is in a log.
    pub(super) fn note(
        &self,
        session: &ClientSession,
        place: &mut KeptFilePlace,
        (file, record): (&NotedFile<'_>, &KeptRecord<'_>),
    ) -> Option<Option<(u64, (u64, u64))>> {
        match self {
            KeptStore::Places(places) if !places.are_needed() => Some(None),
            KeptStore::Places(places) => {
                let begin = || Some((places.begin(file)?, file.handle));
                *place = place.or_else(begin);
                let own = place.filter(|(_, by)| *by == file.handle);
                own.filter(|(place, _)| places.note(*place, record)).map(|_| None)
            }
            KeptStore::Log(store) => {
                let write = WriteRecord {
                    number: 0,
                    id: file.id,
                    handle: file.handle,
                    flags: file.how.flags,
                    pid: file.pid.0,
                    lease: file.lease,
                    base: file.base,
                    at: record.at,
                    kill_set_id: record.kill_set_id,
                    request: record.request.0,
                    who: file.who.clone(),
                };
                store.log.note(store.identity(session), write, record.data).map(Some)
            }
        }
    }

    /// The first batch of a file is being sent by this request.
    pub(super) fn is_sending(
        &self,
        place: KeptFilePlace,
        (id, batch): (FileId, &UnsentBatch),
        request: RequestId,
    ) {
        match (self, place) {
            (KeptStore::Places(places), Some((place, _))) => places.is_sending(place, request),
            (KeptStore::Places(_), None) => {}
            (KeptStore::Log(store), _) => {
                let (last, request) = (batch.logged.last, request.0);
                store.log.sending(SendingRecord { id, last, request });
            }
        }
    }

    /// The batch was not sent.
    pub(super) fn is_not_sent(&self, place: KeptFilePlace) {
        if let (KeptStore::Places(places), Some((place, _))) = (self, place) {
            places.is_not_sent(place);
        }
    }

    /// The batch is written, or beside. The file is like that behind it. With `all` nothing else of the file is kept.
    pub(super) fn is_sent(
        &self,
        place: &mut KeptFilePlace,
        (id, logged, all): (FileId, &LoggedRange, bool),
        (lease, base): (u64, WriteBase),
    ) {
        match self {
            KeptStore::Places(places) => {
                place.take_if(|(place, _)| match all {
                    true => {
                        places.is_sent(*place, (lease, base)) || {
                            places.clear(*place);
                            true
                        }
                    }
                    false => places.is_sent(*place, (lease, base)),
                });
            }
            KeptStore::Log(store) => {
                store.log.sent(SentRecord { id, last: logged.last, base }, logged);
            }
        }
    }
}
