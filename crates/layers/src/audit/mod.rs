//! Audit: every change, open, close and denied access of an export becomes a record.
//!
//! [`Audit`] is an observer. A call leaves its record in a mapped ring (`ring`) before it is answered, so
//! that a killed server loses none. A thread of its own (`writer`) moves records from the ring into
//! segments (`segment`), whose batches are chained by hashes. Consumers have bookmarks (`consumers`), which
//! keep records from being removed (`retention`).
//!
//! docs/AUDIT.md says what is recorded and what survives what; ADR 0047 has the reasons.

mod codec;
mod consumers;
mod filter;
mod kind;
mod log;
mod packed;
mod paths;
mod raw;
mod reader;
mod record;
mod retention;
mod ring;
mod salvage;
mod segment;
mod segment_reader;
mod shared;
#[cfg(test)]
mod tests;
mod varint;
mod verify;
mod writer;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::{Admit, Context, Counted, ObservedCall};

pub use consumers::{CONSUMERS_MAX, Consumer, Consumers};
pub use filter::AuditFilter;
pub use kind::{AuditKind, KindSet, UnknownKind};
pub use log::{SegmentFile, segments};
pub use packed::{PACK_RECORDS_MAX, RecordPack, unpack};
pub use paths::FindPath;
pub use reader::LogReader;
pub use record::{
    AuditClient, AuditGap, AuditPeer, AuditRecord, AuditSet, AuditTotals, AuditUser, GROUPS_MAX,
    Text, is_denied,
};
pub use segment::{BatchHead, Corruption, HASH_BYTES, Hash, SegmentHeader};
pub use segment_reader::{ReadError, ReadStep, SegmentReader};
pub use shared::AuditStatus;
pub use verify::{Verified, verify};
pub use writer::SYNC_TIME;

use crate::observe::{Observer, Outcome};
use raw::RawCall;
use ring::RecordRing;
use shared::Shared;
use writer::{Writer, dirs_of};

/// The size of the ring: about 50,000 records.
const RING_BYTES: usize = 8 << 20;
/// How long a call waits at once for room.
const HOLD_TIME: Duration = Duration::from_millis(20);
/// How often a call tries to leave its record in a full ring, and how long it waits in between.
const PUSH_TRIES: u32 = 100;
const PUSH_AGAIN: Duration = Duration::from_millis(10);
/// How long a former log of the same directory may take to end.
const FORMER_MAX: Duration = Duration::from_secs(5);
const FORMER_LOOK: Duration = Duration::from_millis(20);

/// Decodes bytes as the records of a batch and as a record of the ring, whatever they are, and answers
/// how many records they are. For fuzzing, where no hash stands before the decoders.
pub fn decode_anything(bytes: &[u8]) -> usize {
    let (mut codec, mut input, mut count) = (codec::Codec::new(), varint::RecordInput(bytes), 0);
    while !input.0.is_empty() && codec.get(count as u64, &mut input).is_ok() {
        count += 1;
    }
    let packed = unpack(bytes).map_or(0, |all| all.len());
    count + packed + usize::from(raw::decode(bytes, &mut raw::LastUser::default()).is_ok())
}

/// What happens where a log has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullPolicy {
    /// New changes wait until there is room.
    #[default]
    Block,
    /// Old segments go to another directory.
    Spill,
    /// Records are dropped, and a gap record says how many.
    Drop,
}

impl FullPolicy {
    fn in_words(self) -> &'static str {
        match self {
            FullPolicy::Block | FullPolicy::Spill => "new changes wait until it can be written",
            FullPolicy::Drop => "records are dropped, and a gap record will say how many",
        }
    }
}

/// How a log is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditOptions {
    /// The export.
    pub export: String,
    /// The directory of the log, made if need be.
    pub dir: PathBuf,
    /// What is recorded; denied accesses are anyway.
    pub kinds: KindSet,
    /// What happens without room.
    pub full: FullPolicy,
    /// Where old segments go then.
    pub spill: Option<PathBuf>,
    /// Most bytes of the segments in `dir`.
    pub max_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
}

/// Consumers of this log have seen the records before this one.
fn seen_by_consumers(options: &AuditOptions, log: u128) -> u64 {
    let all = Consumers::of(&options.dir).all().unwrap_or_else(|error| {
        ::log::warn!("audit of export `{}`: its consumers cannot be read: {error}", options.export);
        Vec::new()
    });
    let ours = all.iter().filter(|one| one.log.is_empty() || one.log == format!("{log:032x}"));
    ours.map(|one| one.bookmark).max().unwrap_or(0)
}

/// The audit of an export.
pub struct Audit {
    kinds: KindSet,
    full: FullPolicy,
    shared: Arc<Shared>,
}

impl Audit {
    /// Opens the log, and begins with what a killed server has left. Errors: the log cannot be read
    /// or written.
    pub fn open(options: AuditOptions, find_path: FindPath) -> io::Result<Arc<Audit>> {
        fs::create_dir_all(&options.dir)?;
        options.spill.iter().try_for_each(fs::create_dir_all)?;
        let path = options.dir.join("ring");
        // The ring is this process's from now on, and with it the log.
        let begun = dray_rt::now();
        let (ring, end) = loop {
            match RecordRing::open(&path, RING_BYTES, 0) {
                Ok(ring) => {
                    let mut end = log::find_end(&dirs_of(&options))?;
                    ring.at_least(end.ring_end);
                    end.leave_out_lost(ring.first(), seen_by_consumers(&options, end.log));
                    break (ring, end);
                }
                // The one before is about to end.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && begun.elapsed() < FORMER_MAX =>
                {
                    std::thread::sleep(FORMER_LOOK);
                }
                Err(error) => return Err(error),
            }
        };
        let shared = Arc::new(Shared::new(ring));
        let audit = Audit { kinds: options.kinds, full: options.full, shared: shared.clone() };
        if let Some(broken) = &end.broken {
            let export = &options.export;
            ::log::error!(
                "audit of export `{export}`: {broken}. It stays as it is, and the log goes on in a new segment; `dray \
                 audit verify {export}` says more"
            );
        }
        let torn = end.torn.clone().filter(|torn| {
            // A kill within write(2) leaves a part of a batch, whose records are in the ring still.
            let oldest = shared.ring.oldest();
            let is_whole = end.lost == 0 && oldest.is_some_and(|oldest| oldest <= end.ring_end);
            if is_whole {
                let export = &options.export;
                ::log::warn!(
                    "audit of export `{export}`: {torn}; its records follow from the ring"
                );
            }
            !is_whole
        });
        let why = torn.or((end.lost > 0).then(|| "the end of the log is gone".to_owned()));
        let lost = why.map(|why| (end.lost, why));
        let writer = Writer::new(options, shared, find_path, end);
        std::thread::Builder::new().name("dray-audit".into()).spawn(move || writer.run(lost))?;
        Ok(Arc::new(audit))
    }

    /// Figures.
    pub fn status(&self) -> AuditStatus {
        self.shared.status()
    }

    /// Whether all that was recorded before this call is in the log's segments.
    pub fn is_drained(&self) -> bool {
        self.shared.ring.used_bytes() == 0
    }

    /// Has all that is recorded written and brought to media. False: that was not to be had within
    /// `longest`.
    pub fn finish(&self, longest: Duration) -> bool {
        self.shared.end();
        self.shared.wait_for_end(longest)
    }

    fn record(&self, raw: &RawCall<'_>) {
        raw::encoded(raw, |bytes| {
            let mut tries = if self.full == FullPolicy::Drop { 1 } else { PUSH_TRIES };
            while !self.shared.ring.push(bytes) {
                tries -= 1;
                if tries == 0 {
                    self.shared.lost.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                // Calls were held before that; only many that were under way get here.
                std::thread::sleep(PUSH_AGAIN);
            }
            self.shared.pushed();
        });
    }

    /// Whether calls that leave a record would have to wait now.
    pub fn is_pressed(&self) -> bool {
        self.is_held()
    }

    fn is_held(&self) -> bool {
        let ring = &self.shared.ring;
        self.full != FullPolicy::Drop
            && (self.shared.blocked.load(Ordering::Relaxed)
                || ring.used_bytes() > ring.size_bytes() / 4 * 3)
    }

    fn observe(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, repeated: bool) {
        let denied = outcome.error.is_some_and(|error| is_denied(error.errno()));
        let kind = AuditKind::of(call);
        let counts = match cx.counted {
            Counted::Whole | Counted::IfDone => true,
            Counted::Bytes | Counted::Nothing => false,
        };
        if !counts || !(denied || self.kinds.has(kind)) {
            return;
        }
        let time_us = dray_rt::wall_clock().as_micros() as u64;
        self.record(&RawCall { cx, call, outcome, kind, time_us, repeated });
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl Observer for Audit {
    fn admits(&self) -> bool {
        true
    }

    /// Calls that will leave a record wait for room. A record of a denied call needs no room of its
    /// own: a quarter of the ring is for those.
    fn admit<'a>(&'a self, cx: &'a Context, call: &'a ObservedCall<'a>) -> Admit<'a> {
        if self.lets_pass(cx, call) {
            return Admit::Now;
        }
        self.shared.held.fetch_add(1, Ordering::Relaxed);
        Admit::After(Box::pin(async move {
            while self.is_held() {
                if cx.cancel.as_ref().is_some_and(|cancel| cancel.is_set()) {
                    return Err(cx.cancelled());
                }
                dray_rt::sleep(HOLD_TIME).await;
            }
            Ok(())
        }))
    }

    fn lets_pass(&self, _: &Context, call: &ObservedCall<'_>) -> bool {
        !self.kinds.has(AuditKind::of(call)) || !self.is_held()
    }

    fn counts_opens(&self) -> bool {
        self.kinds.has(AuditKind::Close)
    }

    fn settled(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>) {
        self.observe(cx, call, outcome, true);
    }

    fn done(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, _: Duration) {
        self.observe(cx, call, outcome, false);
    }
}
