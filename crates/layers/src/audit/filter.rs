//! Which records somebody wants.

use super::kind::{AuditKind, KindSet};
use super::record::AuditRecord;

/// A choice of records. What is `None` is not asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// These kinds; denied accesses of any kind, too.
    pub kinds: Option<KindSet>,
    /// This user's.
    pub uid: Option<u32>,
    /// This job's.
    pub job: Option<String>,
    /// At this path or beneath it.
    pub path: Option<Vec<u8>>,
    /// From this time on, microseconds since 1970.
    pub from_us: Option<u64>,
    /// Before this time.
    pub to_us: Option<u64>,
    /// Denied accesses only.
    pub denied: bool,
}

impl AuditFilter {
    /// Whether a record is wanted. Gaps are: nothing is silent.
    pub fn wants(&self, record: &AuditRecord) -> bool {
        if record.kind == AuditKind::Gap {
            return true;
        }
        let denied = record.is_denied();
        let in_time = self.from_us.is_none_or(|from| record.time_us >= from)
            && self.to_us.is_none_or(|to| record.time_us < to);
        in_time
            && (denied || !self.denied)
            && (denied || self.kinds.is_none_or(|kinds| kinds.has(record.kind)))
            && self.uid.is_none_or(|uid| record.user.uid == uid)
            && self.job.as_ref().is_none_or(|job| record.user.job == *job)
            && self.path.as_ref().is_none_or(|path| is_at(record, path))
    }
}

fn is_at(record: &AuditRecord, wanted: &[u8]) -> bool {
    let wanted = wanted.strip_suffix(b"/").unwrap_or(wanted);
    let is_beneath = |path: &[u8]| {
        path.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    };
    [&record.path, &record.to_path].into_iter().flatten().any(|path| is_beneath(path))
}
