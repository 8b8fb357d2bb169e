//! A log at a server, over the wire.

use std::time::Duration;

use dray_client::{Key, Target};
use dray_fabric::{ConnectFrom, connector};
use dray_layers::audit::{AuditFilter, AuditRecord, Consumer, unpack};
use dray_rpc::client::{AuditError, AuditLink};
use dray_rpc::wire::{AuditCall, AuditReply};
use dray_rt::{DriverKind, Executor, timeout};

use super::access::{AccessError, LogAccess, LogPart, LogSummary};
use super::wire::{summary_of_wire, wanted_of, wire_consumer};
use crate::error::{EXIT_REFUSED, Failure};
use crate::output::plain;

/// How long a server may take to let a reader in.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a server may take to answer, beyond the wait that it was asked for.
const ANSWER_MAX: Duration = Duration::from_secs(15);

/// The log of one server. A connection is made with the first question, and with the first one after
/// it broke.
pub struct RemoteLog {
    target: Target,
    key: Option<Key>,
    executor: Executor,
    link: Option<AuditLink>,
}

impl RemoteLog {
    /// Errors: there are no descriptors for an executor.
    pub fn new(target: Target, key: Option<Key>) -> Result<RemoteLog, Failure> {
        let executor = Executor::new(DriverKind::Epoll);
        let executor = executor
            .map_err(|error| Failure::new(format!("cannot start the executor: {error}")))?;
        Ok(RemoteLog { target, key, executor, link: None })
    }

    fn ask(
        &mut self,
        call: &AuditCall,
        wait: Duration,
    ) -> Result<(AuditReply, Vec<AuditRecord>), AccessError> {
        let (target, key) = (&self.target, &self.key);
        let link = &mut self.link;
        let place = server_name(target);
        let answered = self.executor.block_on(async {
            let mut open = match link.take() {
                Some(open) => open,
                None => {
                    let connecting = connect(target, key);
                    timeout(CONNECT_MAX, connecting).await.map_err(|_| silent())??
                }
            };
            let answer = timeout(wait + ANSWER_MAX, open.ask(call)).await;
            let answer = answer.map_err(|_| silent())??;
            *link = Some(open);
            Ok::<_, AuditError>(answer)
        });
        let (reply, data) = answered.map_err(|error| match error {
            AuditError::Away(error) => AccessError::Away(format!("{place}: {error}")),
            AuditError::Refused(why) => {
                let message = format!("{place}: {}", plain(&why));
                AccessError::Refused(Failure { code: EXIT_REFUSED, message })
            }
        })?;
        if let AuditReply::Failed { message, .. } = &reply {
            return Err(Failure::new(format!("{place}: {}", plain(message))).into());
        }
        let records = unpack(&data).map_err(|broken| {
            Failure::new(format!("{place}: records that are none: {}", broken.0))
        })?;
        Ok((reply, records))
    }

    fn strange(&self) -> AccessError {
        Failure::new(format!("{}: an answer to another question", server_name(&self.target))).into()
    }

    /// The bookmark of a consumer after a change.
    fn bookmark(&mut self, call: &AuditCall) -> Result<u64, AccessError> {
        match self.ask(call, Duration::ZERO)?.0 {
            AuditReply::Done { bookmark } => Ok(bookmark),
            AuditReply::Failed { .. } | AuditReply::Part(_) | AuditReply::Summary(_) => {
                Err(self.strange())
            }
        }
    }
}

/// A client without a key shows that its machine vouches for it, as far as it may.
async fn connect(target: &Target, key: &Option<Key>) -> Result<AuditLink, AuditError> {
    let from = if key.is_some() { ConnectFrom::Any } else { ConnectFrom::ReservedPort };
    let connector = connector(&target.address, from);
    AuditLink::connect(&*connector, &target.export, key.clone()).await
}

fn silent() -> AuditError {
    AuditError::Away(std::io::Error::from_raw_os_error(libc::ETIMEDOUT))
}

/// A server as records name it.
pub fn server_name(target: &Target) -> String {
    let address = target.address.to_string();
    address.strip_prefix("tcp://").map_or_else(|| address.clone(), str::to_owned)
}

impl LogAccess for RemoteLog {
    fn summary(&mut self) -> Result<LogSummary, AccessError> {
        match self.ask(&AuditCall::Summary, Duration::ZERO)?.0 {
            AuditReply::Summary(summary) => {
                Ok(summary_of_wire(summary, &server_name(&self.target)))
            }
            AuditReply::Failed { .. } | AuditReply::Part(_) | AuditReply::Done { .. } => {
                Err(self.strange())
            }
        }
    }

    fn read(
        &mut self,
        from: u64,
        filter: &AuditFilter,
        wait: Duration,
    ) -> Result<LogPart, AccessError> {
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let call = AuditCall::Read { from, wanted: wanted_of(filter), wait_ms };
        let (reply, records) = self.ask(&call, wait)?;
        let AuditReply::Part(part) = reply else { return Err(self.strange()) };
        if part.next_index < from {
            return Err(self.strange());
        }
        Ok(LogPart {
            records,
            next_index: part.next_index,
            log: part.log,
            more: part.more,
            complete_us: part.complete_us,
            read_bytes: part.read_bytes,
        })
    }

    fn register(&mut self, consumer: &Consumer, oldest: bool) -> Result<u64, AccessError> {
        self.bookmark(&AuditCall::Register { consumer: wire_consumer(consumer), oldest })
    }

    fn deregister(&mut self, name: &str) -> Result<(), AccessError> {
        self.bookmark(&AuditCall::Deregister { name: name.to_owned() }).map(|_| ())
    }

    fn advance(
        &mut self,
        name: &str,
        log: Option<u128>,
        to: Option<u64>,
    ) -> Result<u64, AccessError> {
        self.bookmark(&AuditCall::Advance { name: name.to_owned(), log, to })
    }
}
