//! What an export is to be like, from `--export NAME=DIR[,OPTION...]` or the configuration.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use dray_backends::posix::{Inline, Squash};
use dray_client::Target;
use dray_core::{Gid, Uid};
use dray_rpc::server::Allow;

use crate::mount::elsewhere;
use crate::nearest::{hint, meant};

/// A directory to be served.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportPlan {
    /// Name by which clients ask for it.
    pub name: String,
    /// The directory.
    pub dir: PathBuf,
    /// Changes are refused.
    pub read_only: bool,
    /// Whose identity is replaced.
    pub squash: Squash,
    /// Who may use it; empty: everybody.
    pub allow: Vec<Allow>,
    /// Without a key, too, any user of a client may be anybody.
    pub insecure: bool,
    /// Pass `O_DIRECT` on to the file system below.
    pub direct: bool,
    /// Which thread does the work.
    pub inline: Inline,
    /// Threads for calls that block, of each kind; 0: as many as the backend thinks best.
    pub threads: usize,
    /// Where a file system must be mounted, on which the directory is: else it is not served.
    pub mountpoint: Option<PathBuf>,
}

/// Options of `--export`, for the help and for slips of the pen.
pub const OPTIONS: [&str; 11] = [
    "ro",
    "rw",
    "squash",
    "allow",
    "anonuid",
    "anongid",
    "direct",
    "threads",
    "secure",
    "insecure",
    "mountpoint",
];

impl ExportPlan {
    /// One with the defaults.
    pub fn new(name: &str, dir: PathBuf) -> Result<ExportPlan, String> {
        Target::check_export(name)?;
        if dir.as_os_str().is_empty() {
            return Err(format!("export `{name}` has no directory"));
        }
        Ok(ExportPlan {
            name: name.to_owned(),
            dir,
            read_only: false,
            squash: Squash::Root(Squash::NOBODY.0, Squash::NOBODY.1),
            allow: Vec::new(),
            insecure: false,
            direct: false,
            inline: Inline::Auto,
            threads: 0,
            mountpoint: None,
        })
    }

    /// From `NAME=DIR[,OPTION...]`; a comma of the directory's name is written `\,`. The
    /// directory is any bytes, as paths are.
    pub fn parse(text: &OsStr) -> Result<ExportPlan, String> {
        let wrong = |what: &str| {
            let end = if what.ends_with('?') { "" } else { ";" };
            format!("{what}{end} an export looks like home=/srv/home,ro")
        };
        let mut halves = text.as_bytes().splitn(2, |byte| *byte == b'=');
        let name = String::from_utf8_lossy(halves.next().unwrap_or_default());
        let rest = halves.next().ok_or_else(|| wrong("expected NAME=DIR"))?;
        let mut parts = split_bytes(rest).into_iter();
        let dir = OsString::from_vec(parts.next().unwrap_or_default());
        let mut plan = ExportPlan::new(&name, dir.into()).map_err(|what| wrong(&what))?;
        let parts = parts.map(|part| String::from_utf8_lossy(&part).into_owned());
        let mut squash = "root".to_owned();
        let (mut uid, mut gid) = Squash::NOBODY;
        let mut allowing = false;
        for part in parts.filter(|part| !part.is_empty()) {
            // Further addresses may follow the first.
            let is_range = || Allow::is_range(&part);
            if allowing && !part.contains('=') && is_range() {
                plan.allow.push(part.parse().map_err(|what: String| wrong(&what))?);
                continue;
            }
            let (key, value) = part.split_once('=').unwrap_or((&part, ""));
            allowing = key == "allow";
            let number =
                || value.parse::<u32>().map_err(|_| wrong(&format!("`{key}` needs a number")));
            let id = || {
                let id = number()?;
                check_id(key, id).map(|()| id).map_err(|what| wrong(&what))
            };
            if matches!(key, "ro" | "rw" | "direct" | "secure" | "insecure") && part.contains('=') {
                return Err(wrong(&format!("`{key}` takes no value")));
            }
            match key {
                "ro" => plan.read_only = true,
                "rw" => plan.read_only = false,
                "direct" => plan.direct = true,
                "secure" | "insecure" => plan.insecure = key == "insecure",
                "squash" => squash = value.to_owned(),
                "allow" => plan.allow.push(value.parse().map_err(|what: String| wrong(&what))?),
                "anonuid" => uid = Uid(id()?),
                "anongid" => gid = Gid(id()?),
                "threads" => {
                    plan.threads =
                        check_threads(number()? as usize).map_err(|what| wrong(&what))?;
                }
                "mountpoint" => {
                    let word = if part.contains('=') { value } else { "yes" };
                    plan.mountpoint =
                        mountpoint_of(word, &plan.dir).map_err(|what| wrong(&what))?;
                }
                _ => {
                    let hint = match elsewhere::of_an_export(key) {
                        Some(instead) => return Err(format!("unknown option `{key}`: {instead}")),
                        None => hint(key, OPTIONS),
                    };
                    return Err(wrong(&format!("unknown option `{key}`{hint}")));
                }
            }
        }
        plan.squash = squash_of(&squash, uid, gid).map_err(|what| wrong(&what))?;
        Ok(plan)
    }
}

/// `root`, `all` or `none`, with the user and group that take their place.
pub fn squash_of(word: &str, uid: Uid, gid: Gid) -> Result<Squash, String> {
    match word {
        "root" => Ok(Squash::Root(uid, gid)),
        "all" => Ok(Squash::All(uid, gid)),
        "none" => Ok(Squash::None),
        _ => {
            let meant = meant(word, ["root", "all", "none"]);
            Err(format!("squash is root, all or none, not `{word}`{meant}"))
        }
    }
}

/// `yes`: the directory `dir` itself; `no`, or the path of a directory that it is in.
pub fn mountpoint_of(word: &str, dir: &Path) -> Result<Option<PathBuf>, String> {
    match word {
        "yes" => Ok(Some(dir.to_owned())),
        "no" => Ok(None),
        path if path.starts_with('/') => Ok(Some(path.into())),
        _ => Err(format!(
            "mountpoint is yes, no or the absolute path of a mount point, not `{word}`{}",
            meant(word, ["yes", "no"])
        )),
    }
}

/// That `id`, the value of `key`, can be somebody's: the last number stands for nobody in system
/// calls, and all that such a user did would fail.
pub fn check_id(key: &str, id: u32) -> Result<(), String> {
    match id {
        u32::MAX => Err(format!("`{key}` is a number below {id}, which is nobody's")),
        _ => Ok(()),
    }
}

/// Most threads of a server, and of one of its exports for calls that block.
const THREADS_MAX: usize = 1024;

/// A number of threads that a server, or one export, may have.
pub fn check_threads(threads: usize) -> Result<usize, String> {
    match threads {
        0..=THREADS_MAX => Ok(threads),
        _ => Err(format!("threads is a number up to {THREADS_MAX}, not {threads}")),
    }
}

/// As [`split_bytes`], of text: cut at commas it stays text.
pub fn split_commas(text: &str) -> Vec<String> {
    let parts = split_bytes(text.as_bytes()).into_iter();
    parts.map(|part| String::from_utf8_lossy(&part).into_owned()).collect()
}

/// Splits at commas; `\,` is a comma, `\\` a backslash.
fn split_bytes(text: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut bytes = text.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let escaped = byte == b'\\' && matches!(bytes.peek(), Some(b',' | b'\\'));
        let byte = if escaped { bytes.next().unwrap_or(byte) } else { byte };
        match parts.last_mut() {
            Some(last) if escaped || byte != b',' => last.push(byte),
            _ => parts.push(Vec::new()),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ExportPlan, String> {
        ExportPlan::parse(OsStr::new(text))
    }

    #[test]
    fn exports_are_read() {
        let plan = parse("home=/srv/home").unwrap();
        assert_eq!((plan.name.as_str(), plan.dir.to_str()), ("home", Some("/srv/home")));
        assert!(!plan.read_only && plan.allow.is_empty());
        assert_eq!(plan.squash, Squash::Root(Uid(65_534), Gid(65_534)));
        let plan = parse("a=/x\\,y,ro,squash=all,anonuid=7,allow=10.0.0.0/8,fd00::/8").unwrap();
        assert_eq!(plan.dir.to_str(), Some("/x,y"));
        assert!(plan.read_only);
        assert_eq!(plan.squash, Squash::All(Uid(7), Gid(65_534)));
        assert_eq!(plan.allow.len(), 2);
        assert_eq!(parse("a=/x,squash=none").unwrap().squash, Squash::None);
        for (text, mountpoint) in [
            ("a=/x", None),
            ("a=/x,mountpoint", Some("/x")),
            ("a=/x,mountpoint=yes,ro", Some("/x")),
            ("a=/x,mountpoint=no", None),
            ("a=/x/y,mountpoint=/x", Some("/x")),
        ] {
            let plan = parse(text).unwrap();
            assert_eq!(plan.mountpoint.as_deref(), mountpoint.map(Path::new), "{text}");
        }
        // What a script leaves between or behind commas is no harm.
        assert!(parse("a=/x,,ro,").unwrap().read_only);
    }

    /// It had to be UTF-8, which paths need not be.
    #[test]
    fn a_directory_is_any_bytes() {
        let plan = ExportPlan::parse(OsStr::from_bytes(b"a=/srv/\xff\\,\xfe,ro")).unwrap();
        assert_eq!(plan.dir.as_os_str().as_bytes(), b"/srv/\xff,\xfe");
        assert!(plan.read_only);
        let name = ExportPlan::parse(OsStr::from_bytes(b"\xff=/srv")).unwrap_err();
        assert!(name.contains("cannot name an export"), "{name}");
        let option = ExportPlan::parse(OsStr::from_bytes(b"a=/srv,r\xff")).unwrap_err();
        assert!(option.contains("unknown option"), "{option}");
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, hint) in [
            ("home", "NAME=DIR"),
            ("=/srv", "empty"),
            ("a/b=/srv", "cannot name"),
            ("home=", "no directory"),
            ("home=/srv,sqash=root", "did you mean `squash`"),
            ("home=/srv,squash=some", "root, all or none"),
            ("home=/srv,squash=rot", "did you mean `root`?"),
            ("home=/srv,ro=1", "takes no value"),
            ("home=/srv,threads=99999999", "up to 1024, not 99999999"),
            ("home=/srv,zzzzzz", "there are: ro, rw, squash"),
            ("home=/srv,allow=10.0.0.0/99", "address range"),
            ("home=/srv,allow=10.1.1.1/8", "say 10.0.0.0/8 for all of these, or 10.1.1.1"),
            ("home=/srv,allow=10.0.0.1,10.1.1.1/8", "say 10.0.0.0/8 for all of these"),
            ("home=/srv,no_root_squash", "unknown option `no_root_squash`: squash=none"),
            ("home=/srv,10.0.0.0/8", "unknown option"),
            ("home=/srv,anonuid=x", "number"),
            ("home=/srv,mountpoint=srv", "absolute path of a mount point, not `srv`"),
            ("home=/srv,mountpoint=ye", "did you mean `yes`?"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn commas_can_be_escaped() {
        assert_eq!(split_commas("a,b\\,c,d\\\\,"), ["a", "b,c", "d\\", ""]);
        assert_eq!(split_commas("a\\b,\u{e4}"), ["a\\b", "\u{e4}"]);
    }
}
