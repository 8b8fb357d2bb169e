//! The plan of an export, from `--export NAME=DIR[,OPTION...]` or from the configuration.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;

use dray_backends::backend::{BackendKind, BackendSource, ExportSettings, Squash};
use dray_client::Target;
use dray_core::{Gid, Uid};
use dray_rpc::server::Allow;

use crate::mount::foreign_options;
use crate::serve::aggregation::{AGGREGATION_OPTIONS, AggregationPlan};
use crate::serve::audit::{AUDIT_OPTIONS, AuditPlan};
use crate::serve::backend_options::{BackendOptions, backend_at};
use crate::serve::forward;
use crate::serve::projections::ServedProjection;
use crate::suggestions::{hint, meant};

/// An export to be served.
#[derive(Clone, Debug)]
pub struct ExportPlan {
    /// Name by which clients ask for it.
    pub name: String,
    /// The directory, as it was named; of a backend without directories what it is shown as.
    pub dir: PathBuf,
    /// Changes are refused.
    pub read_only: bool,
    /// The users whose identity is replaced.
    pub squash: Squash,
    /// The clients that may use it; empty: all.
    pub allow: Vec<Allow>,
    /// Without a key, too, any user of a client may be anybody.
    pub insecure: bool,
    /// Names and attributes are leased to clients that want it.
    pub leases: bool,
    /// Writes are leased, too.
    pub write_leases: bool,
    pub lock_leases: bool,
    /// The kind of what serves it.
    pub backend: &'static dyn BackendKind,
    /// Where its files are.
    pub source: Arc<dyn BackendSource>,
    /// Read-ahead and merged writes.
    pub aggregation: AggregationPlan,
    /// What of the export is audited.
    pub audit: AuditPlan,
    /// The projection that it is this server's part of.
    pub projection: Option<Arc<ServedProjection>>,
}

/// Options of all exports on the command line, for slips of the pen. Backends have further ones.
const OPTIONS: [&str; 12] = [
    "ro",
    "rw",
    "squash",
    "allow",
    "anonuid",
    "anongid",
    "secure",
    "insecure",
    "leases",
    "write_leases",
    "lock_leases",
    "backend",
];

impl ExportPlan {
    /// One of the default backend, with the defaults.
    #[cfg(test)]
    pub fn new(name: &str, dir: PathBuf) -> Result<ExportPlan, String> {
        ExportPlan::of(crate::serve::backend_options::default_backend(), name, dir)?
            .with_own(&BackendOptions::new())
    }

    /// One with the defaults, before its backend has taken its options.
    pub fn of(
        backend: &'static dyn BackendKind,
        name: &str,
        dir: PathBuf,
    ) -> Result<UnconfiguredExport, String> {
        Target::check_export(name)?;
        let dir = match (backend.has_directory(), dir.as_os_str().is_empty()) {
            (true, true) => return Err(format!("export `{name}` has no directory")),
            (true, false) => dir,
            (false, true) => format!("{}:{name}", backend.name()).into(),
            (false, false) => {
                let kind = backend.name();
                return Err(format!("export `{name}`: the backend {kind} has no directory"));
            }
        };
        Ok(UnconfiguredExport {
            backend,
            name: name.to_owned(),
            dir,
            read_only: false,
            squash: Squash::Root(Squash::NOBODY.0, Squash::NOBODY.1),
            allow: Vec::new(),
            insecure: false,
            leases: false,
            write_leases: false,
            lock_leases: false,
            aggregation: AggregationPlan::default(),
            audit: AuditPlan::default(),
        })
    }

    /// From `NAME=DIR[,OPTION...]` or `NAME=TARGET[,OPTION...]`; a comma of the directory's name is written `\,`. The
    /// directory is any bytes, as paths are.
    pub fn parse(text: &OsStr) -> Result<ExportPlan, String> {
        let wrong = |what: &str| {
            let end = if what.ends_with('?') { "" } else { ";" };
            format!("{what}{end} an export looks like home=/srv/home,ro")
        };
        let mut parts = text.as_bytes().splitn(2, |byte| *byte == b'=');
        let name = String::from_utf8_lossy(parts.next().unwrap_or_default());
        let rest = parts.next().ok_or_else(|| wrong("expected NAME=DIR"))?;
        // The hosts of a target are separated by commas, too.
        let (target, rest) = rest.split_at(forward::target_len(rest).unwrap_or(0));
        let mut parts = split_bytes(rest).into_iter();
        let dir = [target, &parts.next().unwrap_or_default()].concat();
        let dir = PathBuf::from(OsString::from_vec(dir));
        let parts: Vec<String> = parts
            .map(|part| String::from_utf8_lossy(&part).into_owned())
            .filter(|part| !part.is_empty())
            .collect();
        let backend = parts.iter().rev().find_map(|part| part.strip_prefix("backend="));
        let plan =
            backend_at(&dir, backend).and_then(|backend| ExportPlan::of(backend, &name, dir));
        plan.map_err(|what| wrong(&what))?.with_options(&parts, &wrong)
    }
}

/// An export whose backend has not taken its options.
pub struct UnconfiguredExport {
    backend: &'static dyn BackendKind,
    name: String,
    dir: PathBuf,
    pub read_only: bool,
    pub squash: Squash,
    pub allow: Vec<Allow>,
    pub insecure: bool,
    pub leases: bool,
    pub write_leases: bool,
    pub lock_leases: bool,
    pub aggregation: AggregationPlan,
    pub audit: AuditPlan,
}

impl UnconfiguredExport {
    /// With the options of the backend's own.
    pub fn with_own(self, own: &BackendOptions) -> Result<ExportPlan, String> {
        let UnconfiguredExport {
            backend,
            name,
            dir,
            read_only,
            squash,
            allow,
            insecure,
            leases,
            write_leases,
            lock_leases,
            aggregation,
            audit,
        } = self;
        let source = backend
            .configure(&ExportSettings { name: &name, dir: &dir, read_only, leases, squash, own })
            .map_err(|wrong| {
                let meant = meant(&wrong.value, wrong.known.iter().copied());
                format!("{}{meant}", wrong.what)
            })?;
        let forwards = forward::is_target(&dir);
        for (wanted, what) in [(write_leases, "write"), (lock_leases, "lock")] {
            if wanted && forwards {
                return Err(format!(
                    "{what}_leases: an export that is forwarded leases no {what}s; leave it out"
                ));
            }
        }
        if leases && forwards && aggregation.read_ahead_bytes > 0 {
            let why = "leases and read_ahead do not go together where an export is forwarded: leave one of \
                       them out";
            return Err(why.into());
        }
        if leases && aggregation.merge_bytes > 0 {
            return Err("leases and merge_writes do not go together: leave one of them out".into());
        }
        for (wanted, key) in [(write_leases, "write_leases"), (lock_leases, "lock_leases")] {
            if wanted && !leases {
                return Err(format!("{key}: it needs leases, too"));
            }
        }
        let projection = None; // of those in a file of projections
        Ok(ExportPlan {
            name,
            dir,
            read_only,
            squash,
            allow,
            insecure,
            leases,
            write_leases,
            lock_leases,
            backend,
            source,
            aggregation,
            audit,
            projection,
        })
    }

    /// With options of the command line. `wrong` makes a message of what is wrong with one.
    fn with_options(
        mut self,
        parts: &[String],
        wrong: &dyn Fn(&str) -> String,
    ) -> Result<ExportPlan, String> {
        let mut squash = "root".to_owned();
        let (mut uid, mut gid) = Squash::NOBODY;
        let mut allowing = false;
        let mut own = BackendOptions::new();
        for part in parts {
            // Further addresses may follow the first.
            if allowing && !part.contains('=') && Allow::is_range(part) {
                self.allow.push(part.parse().map_err(|what: String| wrong(&what))?);
                continue;
            }
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            allowing = key == "allow";
            let id = || {
                let number = value.parse::<u32>();
                let id = number.map_err(|_| wrong(&format!("`{key}` needs a number")))?;
                check_id(key, id).map(|()| id).map_err(|what| wrong(&what))
            };
            if matches!(key, "ro" | "rw" | "secure" | "insecure") && part.contains('=') {
                return Err(wrong(&format!("`{key}` takes no value")));
            }
            match key {
                "ro" => self.read_only = true,
                "rw" => self.read_only = false,
                "secure" | "insecure" => self.insecure = key == "insecure",
                "squash" => squash = value.to_owned(),
                "allow" => self.allow.push(value.parse().map_err(|what: String| wrong(&what))?),
                "anonuid" => uid = Uid(id()?),
                "anongid" => gid = Gid(id()?),
                "leases" => {
                    let value = if part.contains('=') { value } else { "yes" };
                    self.leases = yes_or_no(key, value).map_err(|what| wrong(&what))?;
                }
                "write_leases" => {
                    let value = if part.contains('=') { value } else { "yes" };
                    self.write_leases = yes_or_no(key, value).map_err(|what| wrong(&what))?;
                }
                "lock_leases" => {
                    let value = if part.contains('=') { value } else { "yes" };
                    self.lock_leases = yes_or_no(key, value).map_err(|what| wrong(&what))?;
                }
                "backend" if part.contains('=') => {} // it has been heeded
                _ if AGGREGATION_OPTIONS.contains(&key) => {
                    self.aggregation.set(key, value).map_err(|what| wrong(&what))?;
                }
                _ if AUDIT_OPTIONS.contains(&key) => {
                    self.audit.set(key, value).map_err(|what| wrong(&what))?;
                }
                _ if self.backend.options().contains(&key) => {
                    let value = if part.contains('=') { value } else { "yes" };
                    own.insert(key.to_owned(), value.to_owned());
                }
                _ => return Err(self.unknown_option(key, wrong)),
            }
        }
        self.squash = squash_of(&squash, uid, gid).map_err(|what| wrong(&what))?;
        self.audit.check().map_err(|what| wrong(&what))?;
        self.with_own(&own).map_err(|what| wrong(&what))
    }

    fn unknown_option(&self, key: &str, wrong: &dyn Fn(&str) -> String) -> String {
        if let Some(instead) = foreign_options::of_an_export(key) {
            return format!("unknown option `{key}`: {instead}");
        }
        let known = OPTIONS
            .iter()
            .chain(&AGGREGATION_OPTIONS)
            .chain(&AUDIT_OPTIONS)
            .chain(self.backend.options())
            .copied();
        wrong(&format!("unknown option `{key}`{}", hint(key, known)))
    }
}

fn yes_or_no(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("`{key}` is yes or no, not `{value}`{}", meant(value, ["yes", "no"]))),
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

/// That `id`, the value of `key`, can be somebody's. The last number stands for nobody in system
/// calls, and all that such a user did would fail.
pub fn check_id(key: &str, id: u32) -> Result<(), String> {
    match id {
        u32::MAX => Err(format!("`{key}` is a number below {id}, which is nobody's")),
        _ => Ok(()),
    }
}

/// Most threads of a server.
const THREADS_MAX: usize = 1024;

/// A number of threads that a server may have.
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
        let source = |text| format!("{:?}", parse(text).unwrap().source);
        assert!(source("a=/x,mountpoint,ro").contains("mountpoint: Some(\"/x\")"));
        assert!(source("a=/x/y,mountpoint=/x").contains("mountpoint: Some(\"/x\")"));
        let memory = parse("a=,backend=memory,squash=none,size_mib=8").unwrap();
        assert_eq!((memory.backend.name(), memory.dir.to_str()), ("memory", Some("memory:a")));
        let merging = parse("a=/x,read_ahead=8M,merge_writes=64M").unwrap().aggregation;
        assert_eq!((merging.read_ahead_bytes, merging.merge_bytes), (8 << 20, 64 << 20));
        // What a script leaves between or behind commas is no harm.
        assert!(parse("a=/x,,ro,").unwrap().read_only);
        assert!(
            parse("a=/x,watch_outside=no").is_ok() && parse("a=/x,watch_outside,leases").is_ok()
        );
    }

    #[test]
    fn an_export_that_is_forwarded_leases_on_what_it_can() {
        assert!(parse("a=dray://b/x,leases").unwrap().leases);
        for (options, says) in [
            ("leases,write_leases", "leases no writes"),
            ("leases,lock_leases", "leases no locks"),
            ("leases,read_ahead=8M", "read_ahead do not go together where"),
            ("leases,merge_writes=64M", "merge_writes do not go together"),
        ] {
            let why = parse(&format!("a=dray://b/x,{options}")).err().unwrap();
            assert!(why.contains(says), "{why}");
        }
        assert!(parse("a=/x,leases,read_ahead=8M").is_ok());
    }

    /// The directory had to be UTF-8, which paths need not be.
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
            ("home=/srv,threads=99999999", "up to 1024, not `99999999`"),
            ("home=/srv,zzzzzz", "there are: ro, rw, squash"),
            ("home=/srv,allow=10.0.0.0/99", "address range"),
            ("home=/srv,allow=10.1.1.1/8", "say 10.0.0.0/8 for all of these, or 10.1.1.1"),
            ("home=/srv,allow=10.0.0.1,10.1.1.1/8", "say 10.0.0.0/8 for all of these"),
            ("home=/srv,no_root_squash", "unknown option `no_root_squash`: squash=none"),
            ("home=/srv,10.0.0.0/8", "unknown option"),
            ("home=/srv,anonuid=x", "number"),
            ("home=/srv,merge_writes=1K", "at least 4M"),
            ("home=/srv,readahead=8M", "did you mean `read_ahead`?"),
            ("home=/srv,audit=opne", "there are: all, change, denied, create"),
            ("home=/srv,audit,audit_full=spill", "needs a directory"),
            ("home=/srv,audit_max=10G", "need `audit`, too"),
            ("home=/srv,audit_readers=10.0.0.1", "need `audit`, too"),
            ("home=/srv,mountpoint=srv", "absolute path of a mount point, not `srv`"),
            ("home=/srv,mountpoint=ye", "did you mean `yes`?"),
            ("home=/srv,watch_outside", "watch_outside: it needs leases, too"),
            ("home=/srv,direct=1", "direct is yes or no, not `1`"),
            ("home=/srv,size_mib=8", "unknown option `size_mib`"),
            ("home=/srv,backend=memry", "did you mean `memory`?"),
            ("home=/srv,backend", "unknown option `backend`"),
            ("home=/srv,backend=memory", "the backend memory has no directory"),
            ("home=,backend=memory", "say squash none"),
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
