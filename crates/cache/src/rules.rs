//! Which files a cache keeps.

use dray_core::{Attr, Gid, Uid, glob_matches};

/// Files are kept if one of the rules matches; without rules all are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheRules(Vec<Vec<CacheRule>>);

/// A condition of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheRule {
    /// The path from the mount's root on matches this pattern (`glob_matches`).
    Path(Box<str>),
    /// The name ends with a dot and this.
    Extension(Box<str>),
    /// The file belongs to this user.
    Uid(Uid),
    /// The file belongs to this group.
    Gid(Gid),
    /// The quota of this project counts the file.
    Project(u32),
    /// The reader belongs to this batch job, as a pattern.
    Job(Box<str>),
    /// The file has at least so many bytes.
    SizeMin(u64),
    /// The file has at most so many bytes.
    SizeMax(u64),
    /// The content is at least so many seconds old.
    AgeMin(u64),
    /// The content is at most so many seconds old.
    AgeMax(u64),
}

/// What rules go by.
pub(crate) struct Candidate<'a> {
    pub(crate) attr: &'a Attr,
    /// The path from the mount's root on. None: nobody asks, or it is not known.
    pub(crate) path: Option<&'a [u8]>,
    /// None: nobody asks, or the file system has no projects.
    pub(crate) project: Option<u32>,
    /// The batch job of the reader; empty: none.
    pub(crate) job: &'a str,
    /// Seconds since 1970.
    pub(crate) now_s: i64,
}

/// The conditions, for messages.
const KNOWN: &str = "path=PATTERN, ext=NAME, uid=N, gid=N, project=N, job=PATTERN, size>SIZE, size<SIZE, \
     age>SECONDS or age<SECONDS";

impl CacheRules {
    /// From text such as `uid=1000&size>1M|path=/data/*`: rules behind `|`, conditions of one behind `&`. Errors:
    /// what is wrong with it.
    pub fn parse(text: &str) -> Result<CacheRules, String> {
        let rules = text.split('|').map(|rule| rule.split('&').map(parse_condition).collect());
        rules.collect::<Result<Vec<_>, _>>().map(CacheRules)
    }

    fn any(&self, is_asked: impl Fn(&CacheRule) -> bool) -> bool {
        self.0.iter().flatten().any(is_asked)
    }

    pub(crate) fn ask_for_paths(&self) -> bool {
        self.any(|rule| matches!(rule, CacheRule::Path(_) | CacheRule::Extension(_)))
    }

    pub(crate) fn ask_for_jobs(&self) -> bool {
        self.any(|rule| matches!(rule, CacheRule::Job(_)))
    }

    pub(crate) fn ask_for_projects(&self) -> bool {
        self.any(|rule| matches!(rule, CacheRule::Project(_)))
    }

    /// Whether a file is kept.
    pub(crate) fn keep(&self, file: &Candidate<'_>) -> bool {
        self.0.is_empty() || self.0.iter().any(|rule| rule.iter().all(|one| one.holds(file)))
    }
}

impl CacheRule {
    fn holds(&self, file: &Candidate<'_>) -> bool {
        let age_s = file.now_s.saturating_sub(file.attr.mtime.sec);
        let seconds = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX);
        match self {
            CacheRule::Path(pattern) => {
                file.path.is_some_and(|path| glob_matches(pattern.as_bytes(), path))
            }
            CacheRule::Extension(name) => file.path.is_some_and(|path| {
                path.strip_suffix(name.as_bytes()).is_some_and(|rest| rest.ends_with(b"."))
            }),
            CacheRule::Uid(uid) => file.attr.uid == *uid,
            CacheRule::Gid(gid) => file.attr.gid == *gid,
            CacheRule::Project(project) => file.project == Some(*project),
            CacheRule::Job(pattern) => {
                !file.job.is_empty() && glob_matches(pattern.as_bytes(), file.job.as_bytes())
            }
            CacheRule::SizeMin(bytes) => file.attr.size >= *bytes,
            CacheRule::SizeMax(bytes) => file.attr.size <= *bytes,
            CacheRule::AgeMin(age) => age_s >= seconds(*age),
            CacheRule::AgeMax(age) => age_s <= seconds(*age),
        }
    }
}

fn parse_condition(text: &str) -> Result<CacheRule, String> {
    let text = text.trim();
    let wrong = || format!("`{text}` is no condition of the cache: {KNOWN}");
    let at = text.find(['=', '<', '>']).ok_or_else(wrong)?;
    let (key, value) = (text[..at].trim(), text[at + 1..].trim());
    let number = || value.parse::<u64>().map_err(|_| wrong());
    let id = || value.parse::<u32>().map_err(|_| wrong());
    let size = || parse_size(value).ok_or_else(wrong);
    let pattern = || if value.is_empty() { Err(wrong()) } else { Ok(Box::from(value)) };
    match (key, text.as_bytes()[at]) {
        ("path", b'=') if value.starts_with(['/', '*']) => pattern().map(CacheRule::Path),
        ("path", b'=') => Err(format!(
            "`{text}` matches no file: paths begin with a slash, at the root of the mount"
        )),
        ("ext", b'=') if value.contains('/') => Err(wrong()),
        ("ext", b'=') => Ok(CacheRule::Extension(pattern()?.trim_start_matches('.').into())),
        ("uid", b'=') => id().map(|uid| CacheRule::Uid(Uid(uid))),
        ("gid", b'=') => id().map(|gid| CacheRule::Gid(Gid(gid))),
        ("project", b'=') => id().map(CacheRule::Project),
        ("job", b'=') => pattern().map(CacheRule::Job),
        ("size", b'>') => size().map(CacheRule::SizeMin),
        ("size", b'<') => size().map(CacheRule::SizeMax),
        ("age", b'>') => number().map(CacheRule::AgeMin),
        ("age", b'<') => number().map(CacheRule::AgeMax),
        _ => Err(wrong()),
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

    fn attr(uid: u32, size: u64, sec: i64) -> Attr {
        Attr { uid: Uid(uid), size, mtime: Timestamp { sec, nsec: 0 }, ..Attr::default() }
    }

    fn kept(rules: &str, file: &Candidate<'_>) -> bool {
        CacheRules::parse(rules).unwrap().keep(file)
    }

    #[test]
    fn files_are_kept_by_rules() {
        let of = |attr: Attr| {
            let file = Candidate { attr: &attr, path: None, project: None, job: "", now_s: 1000 };
            (kept("uid=7&size>1M | age>100&size<4k", &file), CacheRules::default().keep(&file))
        };
        assert_eq!(of(attr(7, 1 << 20, 1000)), (true, true));
        assert_eq!(of(attr(8, 1 << 20, 1000)), (false, true));
        assert_eq!(of(attr(8, 4096, 900)), (true, true));
        assert_eq!(of(attr(8, 4096, 901)), (false, true));
    }

    #[test]
    fn paths_extensions_jobs_and_projects_are_conditions() {
        let attr = attr(7, 1, 990);
        let (path, job) = (&b"/data/run.d/7.h5"[..], "slurm-12");
        let known = Candidate { attr: &attr, path: Some(path), project: Some(3), job, now_s: 1000 };
        let unknown = Candidate { path: None, project: None, job: "", ..known };
        let rules =
            ["path=/data/*.h5", "ext=h5", "ext=.h5", "project=3", "job=slurm-*", "age<10&ext=h5"];
        for rule in rules {
            assert!(kept(rule, &known), "{rule}");
            assert!(!kept(rule, &unknown), "{rule}: what is not known does not match");
        }
        let others = ["path=/data/?.h5", "ext=5", "project=0", "job=slurm", "age<9"];
        for rule in others {
            assert!(!kept(rule, &known), "{rule}");
        }
        assert!(CacheRules::parse("project=3|job=x").unwrap().ask_for_projects());
        assert!(!CacheRules::parse("job=x").unwrap().ask_for_paths());
    }

    #[test]
    fn what_is_no_condition_is_refused() {
        let all = [
            "",
            "uid",
            "uid=x",
            "size>1X",
            "size>99999999T",
            "path=data",
            "path=",
            "age>-1",
            "ext=",
            "ext=/x",
            "job=",
            "size=7",
            "uid>7",
            "mtime<3",
        ];
        for wrong in all {
            assert!(CacheRules::parse(wrong).is_err(), "{wrong}");
        }
    }
}
