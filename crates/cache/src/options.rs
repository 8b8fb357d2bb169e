//! How a cache behaves, and which files it keeps.

use std::path::PathBuf;

use dray_core::{Attr, Gid, Uid};

/// A cache of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The directory in which it lies; several mounts may share it.
    pub dir: PathBuf,
    /// Most bytes that all entries take.
    pub size_bytes: u64,
    /// Which files are kept.
    pub rules: CacheRules,
}

/// Files are kept if one of the rules matches; without rules all are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheRules(Vec<Vec<CacheRule>>);

/// A condition of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheRule {
    /// The file belongs to this user.
    Uid(Uid),
    /// The file belongs to this group.
    Gid(Gid),
    /// The file has at least so many bytes.
    SizeMin(u64),
    /// The file has at most so many bytes.
    SizeMax(u64),
    /// The content is at least so many seconds old.
    AgeMin(u64),
}

impl CacheRules {
    /// From text such as `uid=1000&size>1M|gid=100`: rules behind `|`, conditions of one behind `&`. Errors: what
    /// is wrong with it.
    pub fn parse(text: &str) -> Result<CacheRules, String> {
        let rules = text.split('|').map(|rule| rule.split('&').map(parse_condition).collect());
        rules.collect::<Result<Vec<_>, _>>().map(CacheRules)
    }

    /// Whether a file with these attributes is kept. `now_s`: seconds since 1970.
    pub(crate) fn keep(&self, attr: &Attr, now_s: i64) -> bool {
        let holds = |condition: &CacheRule| match *condition {
            CacheRule::Uid(uid) => attr.uid == uid,
            CacheRule::Gid(gid) => attr.gid == gid,
            CacheRule::SizeMin(bytes) => attr.size >= bytes,
            CacheRule::SizeMax(bytes) => attr.size <= bytes,
            CacheRule::AgeMin(seconds) => {
                now_s.saturating_sub(attr.mtime.sec) >= i64::try_from(seconds).unwrap_or(i64::MAX)
            }
        };
        self.0.is_empty() || self.0.iter().any(|rule| rule.iter().all(holds))
    }
}

fn parse_condition(text: &str) -> Result<CacheRule, String> {
    let wrong = || {
        format!(
            "`{text}` is no condition of the cache: uid=N, gid=N, size>SIZE, size<SIZE or age>SECONDS"
        )
    };
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| wrong());
    let id = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
    let text = text.trim();
    if let Some(uid) = text.strip_prefix("uid=") {
        return id(uid).map(|uid| CacheRule::Uid(Uid(uid)));
    }
    if let Some(gid) = text.strip_prefix("gid=") {
        return id(gid).map(|gid| CacheRule::Gid(Gid(gid)));
    }
    if let Some(size) = text.strip_prefix("size>") {
        return parse_size(size).map(CacheRule::SizeMin).ok_or_else(wrong);
    }
    if let Some(size) = text.strip_prefix("size<") {
        return parse_size(size).map(CacheRule::SizeMax).ok_or_else(wrong);
    }
    match text.strip_prefix("age>") {
        Some(seconds) => number(seconds).map(CacheRule::AgeMin),
        None => Err(wrong()),
    }
}

/// Bytes, with K, M, G or T (powers of 1024) behind them. None: it is no size.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let shift = match text.chars().last()?.to_ascii_uppercase() {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use dray_core::Timestamp;

    use super::*;

    #[test]
    fn files_are_kept_by_rules() {
        let attr = |uid, size, sec| Attr {
            uid: Uid(uid),
            size,
            mtime: Timestamp { sec, nsec: 0 },
            ..Attr::default()
        };
        let rules = CacheRules::parse("uid=7&size>1M | age>100&size<4k").unwrap();
        assert!(rules.keep(&attr(7, 1 << 20, 1000), 1000));
        assert!(!rules.keep(&attr(8, 1 << 20, 1000), 1000));
        assert!(rules.keep(&attr(8, 4096, 900), 1000) && !rules.keep(&attr(8, 4096, 901), 1000));
        assert!(CacheRules::default().keep(&attr(1, 0, 0), 0));
        for wrong in ["", "uid", "uid=x", "size>1X", "size>99999999T", "path=/x", "age>-1"] {
            assert!(CacheRules::parse(wrong).is_err(), "{wrong}");
        }
    }
}
