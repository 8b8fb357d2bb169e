//! Audits of this server for readers on other machines.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_backends::backend::Squash;
use dray_client::Key;
use dray_core::Errno;
use dray_layers::audit::RecordPack;
use dray_rpc::server::{AuditExport, AuditPort, AuditReader};
use dray_rpc::wire::{AuditCall, AuditReply};

use crate::audit::access::{AccessError, LogAccess, LogPart};
use crate::audit::local::LocalLog;
use crate::audit::place::LogPlace;
use crate::audit::wire::{consumer_of_wire, filter_of, wire_part, wire_summary};
use crate::error::Failure;
use crate::serve::export::ExportPlan;
use crate::serve::export_state::ExportState;

/// Between a call's time in its record and the record in the ring no more time passes than this.
const RECORDED_WITHIN_US: u64 = 100_000;

/// The port for the audits of these exports.
pub fn of_exports(
    plans: &[ExportPlan],
    exports: &[Arc<ExportState>],
    key: Option<Key>,
    state: &Path,
) -> AuditPort {
    let audited = plans.iter().zip(exports).filter(|(plan, _)| plan.audit.kinds.is_some());
    let port_of = |(plan, exported): (&ExportPlan, &Arc<ExportState>)| {
        let (place, exported) = (LogPlace::in_state(state, &plan.name), exported.clone());
        let open = move || -> Box<dyn AuditReader> {
            Box::new(ServedLog { log: LocalLog::new(place.clone()), exported: exported.clone() })
        };
        let export = AuditExport {
            allow: plan.allow.clone(),
            trusts_root: matches!(plan.squash, Squash::None),
            readers: plan.audit.readers.clone(),
            open: Box::new(open),
        };
        (plan.name.clone(), export)
    };
    AuditPort::new(key, audited.map(port_of).collect::<BTreeMap<_, _>>())
}

/// A log for one reader.
struct ServedLog {
    log: LocalLog,
    exported: Arc<ExportState>,
}

impl ServedLog {
    fn read(&mut self, call: &AuditCall) -> Result<(AuditReply, Vec<u8>), AccessError> {
        let done = |bookmark| Ok((AuditReply::Done { bookmark }, Vec::new()));
        match call {
            AuditCall::Read { from, wanted, wait_ms: _ } => {
                let filter =
                    filter_of(wanted).map_err(|unknown| Failure::usage(unknown.to_string()))?;
                let drained_us = self.drained_us();
                let mut part = self.log.read(*from, &filter, Duration::ZERO)?;
                if !part.more {
                    part.complete_us = part.complete_us.max(drained_us);
                }
                Ok((AuditReply::Part(wire_part(&part)), packed(&part)))
            }
            AuditCall::Summary => {
                let summary = wire_summary(self.log.summary()?);
                Ok((AuditReply::Summary(summary), Vec::new()))
            }
            AuditCall::Register { consumer, oldest } => {
                done(self.log.register(&consumer_of_wire(consumer.clone()), *oldest)?)
            }
            AuditCall::Deregister { name } => {
                self.log.deregister(name)?;
                done(0)
            }
            AuditCall::Advance { name, log, to } => done(self.log.advance(name, *log, *to)?),
        }
    }

    /// The time up to which all records are in segments; 0: some are not.
    fn drained_us(&self) -> u64 {
        let now_us = dray_rt::wall_clock().as_micros() as u64;
        match self.exported.audit() {
            Some(audit) if audit.is_drained() => now_us.saturating_sub(RECORDED_WITHIN_US),
            Some(_) | None => 0,
        }
    }
}

fn packed(part: &LogPart) -> Vec<u8> {
    let mut pack = RecordPack::default();
    part.records.iter().for_each(|record| pack.put(record));
    pack.into_bytes()
}

impl AuditReader for ServedLog {
    fn answer(&mut self, call: &AuditCall) -> (AuditReply, Vec<u8>) {
        self.read(call).unwrap_or_else(|error| {
            let message = Failure::from(error).message;
            (AuditReply::Failed { errno: Errno::EIO.raw() as u16, message }, Vec::new())
        })
    }
}
