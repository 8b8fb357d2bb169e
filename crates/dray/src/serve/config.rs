//! The configuration file of a server. packaging/dray.toml.example documents every key.

mod keys;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dray_backends::backend::Squash;
use dray_core::{Errno, Gid, Op, Uid};
use dray_fabric::Address;
use dray_layers::faults::{Fault, When};
use serde::Deserialize;

use crate::error::Failure;
use crate::metrics_http::check_address;
use crate::serve::audit::{AUDIT_KEYS, AuditTable};
use crate::serve::audit_sinks::{SinkPlan, SinkTable};
use crate::serve::backend_options::{BackendOptions, backend_at, backend_in, own_options};
use crate::serve::export::{ExportPlan, check_id, check_threads, squash_of};
use crate::serve::plan::key_file;
use crate::serve::qos;
use crate::suggestions::{hint, meant};
use keys::{
    EXPORT_KEYS, FAULT_KEYS, KEYS, check_keys, check_sinks, head_of, in_plain_words, line_of,
};

/// The file, as written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Where to listen.
    pub listen: Vec<String>,
    /// `none` or `psk:FILE`.
    pub auth: Option<String>,
    /// `ADDR:PORT` of the metrics.
    pub metrics: Option<String>,
    /// State directory.
    pub state: Option<PathBuf>,
    /// Threads.
    pub threads: Option<usize>,
    /// How long clients may be away, seconds.
    pub lease_s: Option<u64>,
    /// Memory for data on its way, MiB.
    pub buffers_mib: Option<usize>,
    /// Clients at once.
    pub clients_max: Option<usize>,
    /// Of these at one address.
    pub clients_of_one_address_max: Option<usize>,
    /// The file of the projections that this server is a part of.
    pub projections: Option<PathBuf>,
    /// Which of the servers of a projection it is.
    pub server: Option<String>,
    /// What becomes of audits, `[audit.sink.NAME]`.
    pub audit: AuditSinks,
    /// Shares of bandwidth: `[qos.rule.NAME]`.
    pub qos: toml::Table,
    /// Whether `[[fault]]` is heeded.
    pub faults: bool,
    /// The exports.
    pub export: Vec<ExportTable>,
    /// Things that go wrong on purpose.
    pub fault: Vec<FaultTable>,
}

/// The table `audit`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct AuditSinks {
    sink: BTreeMap<String, SinkTable>,
}

/// One `[[export]]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ExportTable {
    name: String,
    dir: PathBuf,
    read_only: bool,
    squash: Option<String>,
    anonuid: Option<u32>,
    anongid: Option<u32>,
    allow: Vec<String>,
    insecure: bool,
    leases: bool,
    write_leases: bool,
    lock_leases: bool,
    read_ahead: Option<String>,
    merge_writes: Option<String>,
    audit: Option<AuditTable>,
    backend: Option<String>,
    /// The options of its backend's own.
    #[serde(skip)]
    own: BackendOptions,
}

/// One `[[fault]]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct FaultTable {
    /// The export that it is for; none: all.
    pub export: Option<String>,
    op: Option<String>,
    error: Option<String>,
    delay_ms: u64,
    one_in: Option<u64>,
    nth: Option<u64>,
}

/// Of a configuration; /dev/zero has no end.
const BYTES_MAX: u64 = 1 << 20;

impl Config {
    /// Reads a file. Errors: it cannot be read, is no TOML, or says something unknown.
    pub fn read(path: &Path) -> Result<Config, Failure> {
        let shown = path.display();
        let text = read_text(path, "configuration")?;
        let config = Config::parse(&text).and_then(|config| config.check().map(|()| config));
        config.map_err(|what| Failure::usage(format!("{shown}: {}", what.trim_end())))
    }

    /// Whether every value makes sense, also where the command line has precedence.
    fn check(&self) -> Result<(), String> {
        self.addresses()?;
        self.lease()?;
        self.buffers()?;
        check_threads(self.threads.unwrap_or(0))?;
        self.auth.as_deref().map_or(Ok(None), key_file)?;
        if self.state.as_deref() == Some(Path::new("")) {
            return Err("state is empty: name a directory, or leave it out".to_owned());
        }
        let metrics = self.metrics.as_deref().map_or(Ok(()), check_address);
        metrics.map_err(|what| format!("metrics: {what}"))?;
        for (key, value) in [
            ("clients_max", self.clients_max),
            ("clients_of_one_address_max", self.clients_of_one_address_max),
        ] {
            if value == Some(0) {
                return Err(format!("{key} = 0 would admit no client: use a number from 1 on"));
            }
        }
        self.sinks()?;
        qos::rules_in(&self.qos)?;
        let exports = self.exports()?;
        let known = || exports.iter().map(|export| export.name.as_str());
        for fault in &self.fault {
            fault.plan()?;
            // Exports of the command line are not known here.
            let unknown = fault.export.as_deref().filter(|name| !known().any(|one| one == *name));
            if let Some(name) = unknown.filter(|_| self.faults) {
                log::warn!("[[fault]] for export `{name}`, which is not in this file");
            }
        }
        Ok(())
    }

    fn parse(text: &str) -> Result<Config, String> {
        let table: toml::Table = text.parse().map_err(in_plain_words)?;
        check_keys(text, 0, "the top level", &table, &KEYS)?;
        check_sinks(text, &table)?;
        let mut own = Vec::new();
        for name in ["export", "fault"] {
            if table.get(name).is_some_and(|value| !value.is_array()) {
                let line = line_of(text, 0, name).unwrap_or(1);
                return Err(format!(
                    "line {line}: each {name} is a table [[{name}]], with two brackets"
                ));
            }
            let tables = table.get(name).and_then(toml::Value::as_array);
            let tables = tables.into_iter().flatten().filter_map(toml::Value::as_table);
            for (number, one) in tables.enumerate() {
                let place = format!("[[{name}]]");
                let head = head_of(text, &place, number);
                if name == "fault" {
                    check_keys(text, head, &place, one, &FAULT_KEYS)?;
                    continue;
                }
                let backend = backend_in(one)?;
                let keys = [&EXPORT_KEYS[..], backend.options()].concat();
                check_keys(text, head, &place, one, &keys)?;
                if let Some(audit) = one.get("audit").and_then(toml::Value::as_table) {
                    check_keys(text, head, "`audit` of [[export]]", audit, &AUDIT_KEYS)?;
                }
                own.push(own_options(backend, one)?);
            }
        }
        let mut config: Config = toml::from_str(text).map_err(in_plain_words)?;
        config.export.iter_mut().zip(own).for_each(|(export, own)| export.own = own);
        Ok(config)
    }

    /// Addresses to listen on.
    pub fn addresses(&self) -> Result<Vec<Address>, String> {
        let parse = |text: &String| text.parse().map_err(|what| format!("listen: {what}"));
        self.listen.iter().map(parse).collect()
    }

    /// The exports.
    pub fn exports(&self) -> Result<Vec<ExportPlan>, String> {
        self.export.iter().map(ExportTable::plan).collect()
    }

    /// Faults for export `name`; none unless they are switched on.
    pub fn faults_of(&self, name: &str) -> Result<Vec<Fault>, String> {
        let ours = |fault: &&FaultTable| fault.export.as_deref().is_none_or(|only| only == name);
        match self.faults {
            true => self.fault.iter().filter(ours).map(FaultTable::plan).collect(),
            false => Ok(Vec::new()),
        }
    }

    /// What audits are passed on to.
    pub fn sinks(&self) -> Result<Vec<SinkPlan>, String> {
        let plan = |(name, sink): (&String, &SinkTable)| {
            sink.plan(name).map_err(|what| format!("[audit.sink.{name}]: {what}"))
        };
        self.audit.sink.iter().map(plan).collect()
    }

    /// How long clients may be away.
    pub fn lease(&self) -> Result<Option<Duration>, String> {
        match self.lease_s {
            Some(seconds @ 1..=86_400) => Ok(Some(Duration::from_secs(seconds))),
            Some(_) => Err("lease_s is a number of seconds from 1 to 86400".to_owned()),
            None => Ok(None),
        }
    }

    /// Memory for data on its way, MiB.
    pub fn buffers(&self) -> Result<Option<usize>, String> {
        match self.buffers_mib {
            Some(8..=1_048_576) | None => Ok(self.buffers_mib),
            Some(_) => Err("buffers_mib is a number from 8 to 1048576".to_owned()),
        }
    }
}

/// The text of a file. `what` it is, for people. Errors: it cannot be read, is too long, or no text.
pub fn read_text(path: &Path, what: &str) -> Result<String, Failure> {
    let shown = path.display();
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut text));
    read.map_err(|error| Failure::usage(format!("cannot read the {what} {shown}: {error}")))?;
    if text.len() as u64 > BYTES_MAX {
        let why = format!("{shown}: longer than {BYTES_MAX} bytes, which is no file of that kind");
        return Err(Failure::usage(why));
    }
    String::from_utf8(text).map_err(|_| Failure::usage(format!("{shown}: it is not UTF-8 text")))
}

/// The export of a projection, whose options stand in its subtable `export`.
pub fn projected_export(
    name: &str,
    dir: &Path,
    options: &toml::Table,
) -> Result<ExportPlan, String> {
    let backend = backend_in(options)?;
    let known = [&EXPORT_KEYS[..], backend.options()].concat();
    let known = || known.iter().copied().filter(|key| !matches!(*key, "name" | "dir"));
    if let Some(key) = options.keys().find(|key| !known().any(|one| one == key.as_str())) {
        return Err(format!("unknown key `{key}` in its export{}", hint(key, known())));
    }
    let mut table: ExportTable = options.clone().try_into().map_err(in_plain_words)?;
    table.name = name.to_owned();
    table.dir = dir.to_owned();
    table.own = own_options(backend, options)?;
    table.plan()
}

impl ExportTable {
    fn plan(&self) -> Result<ExportPlan, String> {
        if self.name.is_empty() {
            let dir = self.dir.display();
            return Err(format!("the [[export]] of `{dir}` has no name, as in name = \"home\""));
        }
        let backend = backend_at(&self.dir, self.backend.as_deref())?;
        if self.dir.as_os_str().is_empty() && backend.has_directory() {
            let name = &self.name;
            return Err(format!("export `{name}` has no directory, as in dir = \"/srv/home\""));
        }
        let mut plan = ExportPlan::of(backend, &self.name, self.dir.clone())?;
        let of = |what: String| format!("export `{}`: {what}", self.name);
        for (key, id) in [("anonuid", self.anonuid), ("anongid", self.anongid)] {
            id.map_or(Ok(()), |id| check_id(key, id)).map_err(of)?;
        }
        let uid = self.anonuid.map_or(Squash::NOBODY.0, Uid);
        let gid = self.anongid.map_or(Squash::NOBODY.1, Gid);
        plan.squash = squash_of(self.squash.as_deref().unwrap_or("root"), uid, gid).map_err(of)?;
        for text in &self.allow {
            plan.allow
                .push(text.parse().map_err(|what| format!("export `{}`: {what}", self.name))?);
        }
        plan.read_only = self.read_only;
        plan.insecure = self.insecure;
        plan.leases = self.leases;
        plan.write_leases = self.write_leases;
        plan.lock_leases = self.lock_leases;
        for (key, value) in [("read_ahead", &self.read_ahead), ("merge_writes", &self.merge_writes)]
        {
            let value = value.as_deref().unwrap_or("no");
            plan.aggregation.set(key, value).map_err(of)?;
        }
        if let Some(audit) = &self.audit {
            plan.audit = audit.plan().map_err(of)?;
        }
        plan.with_own(&self.own).map_err(of)
    }
}

impl FaultTable {
    fn plan(&self) -> Result<Fault, String> {
        let op = match &self.op {
            None => None,
            Some(name) => Some(find_op(name)?),
        };
        let error = match &self.error {
            None => None,
            Some(name) => Some(find_errno(name)?),
        };
        let when = match (self.one_in, self.nth) {
            (None, None) => When::Always,
            (Some(0), None) | (None, Some(0)) => {
                return Err("one_in and nth of a fault are numbers from 1 on".to_owned());
            }
            (Some(every), None) => When::OneIn(every),
            (None, Some(nth)) => When::Nth(nth),
            _ => return Err("a fault has one_in or nth, not both".to_owned()),
        };
        Ok(Fault { op, when, delay: Duration::from_millis(self.delay_ms), error })
    }
}

fn find_op(name: &str) -> Result<Op, String> {
    let found = Op::ALL.iter().find(|op| op.name() == name).copied();
    found.ok_or_else(|| {
        let hint = hint(name, Op::ALL.iter().map(|op| op.name()));
        format!("no operation is called `{name}`{hint}")
    })
}

fn find_errno(name: &str) -> Result<Errno, String> {
    let found = (1..134).map(Errno::new).find(|errno| errno.name() == name);
    found.ok_or_else(|| {
        let names: Vec<&str> = (1..134).map(|raw| Errno::new(raw).name()).collect();
        format!("no error number is called `{name}`{}", meant(name, names))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::backend_options::{default_backend, kinds};

    #[test]
    fn the_example_is_sound_and_documents_every_key() {
        let example = include_str!("../../../../packaging/dray.toml.example");
        // What is commented out must hold when it is not.
        let active: String = example
            .lines()
            .map(|line| line.strip_prefix("#:").unwrap_or(line).to_owned() + "\n")
            .collect();
        let config = Config::parse(&active).unwrap();
        config.addresses().unwrap();
        assert!(!config.exports().unwrap().is_empty());
        assert!(!config.faults_of("home").unwrap().is_empty());
        let own = default_backend().options();
        for key in KEYS.iter().chain(&EXPORT_KEYS).chain(&FAULT_KEYS).chain(own) {
            assert!(line_of(&active, 0, key).is_some(), "`{key}` is not documented");
        }
        for kind in kinds() {
            let mut words = kind.options().iter().copied().chain([kind.name()]);
            assert!(words.all(|word| example.contains(word)), "{kind:?} is not documented");
        }
        Config::parse(example).unwrap();
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_known() {
        for (text, words) in [
            (
                "\nlissen = []\n",
                "line 2: unknown key `lissen` in the top level; did you mean `listen`?",
            ),
            ("[[export]]\nname = \"a\"\nreadonly = true\n", "did you mean `read_only`?"),
            ("[[exports]]\nname = \"a\"\n", "did you mean `export`?"),
            (
                "threads = 1\n[[export]]\nthreads = 2\n[[export]]\nauth = 1\n[[export]]\n",
                "line 5: unknown key `auth` in [[export]]",
            ),
            ("auth = 'none'\n[[export]]\nauth = 'none'\n", "line 3: unknown key `auth`"),
            ("zzzzzz = 1\n", "unknown key `zzzzzz` in the top level; there are: listen, auth"),
            (
                "[[export]]\nlisten = []\n",
                "line 2: unknown key `listen` in [[export]]; it belongs further up",
            ),
            (
                "name = 'a'\n",
                "unknown key `name` in the top level; it belongs below a line [[export]]",
            ),
            ("[[export]]\nop = 'a'\n", "it belongs below a line [[fault]]"),
            ("[[export]]\nro = true\n", "did you mean `read_only`?"),
            ("Listen = []\n", "did you mean `listen`?"),
            ("buffers = 1\n", "did you mean `buffers_mib`?"),
            ("[audit.sink.a]\ntyp = 1\n", "line 2: unknown key `typ` in [audit.sink.a]"),
            ("[audit]\nsinks = 1\n", "did you mean `sink`?"),
            ("[export]\nname = \"a\"\n", "line 1: each export is a table [[export]]"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_without_end_is_none() {
        let failure = Config::read(Path::new("/dev/zero")).unwrap_err();
        assert!(failure.message.contains("longer than"), "{}", failure.message);
    }

    #[test]
    fn wrong_values_are_named() {
        let exports = |text: &str| Config::parse(text).unwrap().exports().unwrap_err();
        assert!(exports("[[export]]\nname='a'\ndir='/x'\nsquash='x'\n").contains("root, all"));
        assert!(exports("[[export]]\nname='a'\ndir='/x'\nallow=['x']\n").contains("`x`"));
        assert!(exports("[[export]]\nname='a'\n").contains("no directory"));
        assert!(exports("[[export]]\ndir='/x'\n").contains("of `/x` has no name"));
        assert!(exports("[[export]]\nname='a'\ndir='/x'\ninline='x'\n").contains("inline"));
        for (text, words) in [
            ("threads = 'many'\n", "expected a whole number from 0 on"),
            ("lease_s = -5\n", "expected a whole number from 0 on"),
            ("faults = 1\n", "expected true or false"),
            ("listen = 'tcp://0.0.0.0'\n", "line 1"),
            ("listen = 'tcp://0.0.0.0'\n", "expected a list in brackets"),
            ("[[export]\n", "line 1"),
            ("export = ['a']\n", "expected a table [[export]]"),
            ("state = 1\n", "expected a path in quotes"),
            ("[[export]]\nmountpoint = []\n", "`mountpoint` in [[export]] is true, false"),
            ("[[export]]\nbackend = 'zfs'\n", "no backend is called `zfs`; there are: posix"),
            ("[[export]]\nbackend = 7\n", "line 2"),
            ("[[export]]\nsize_mib = 7\n", "line 2: unknown key `size_mib` in [[export]]"),
            ("[[export]]\naudit = {kind = []}\n", "did you mean `kinds`?"),
            ("[[export]]\naudit = 1\n", "a table such as"),
            ("[[export]]\nanonuid = 5000000000\n", "from 0 to 4294967295"),
            ("[[export]]\nanonuid = 99999999999999999999\n", "`, a number that is too large"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let faults = "faults=true\n[[fault]]\nop='wirte'\n";
        let error = Config::parse(faults).unwrap().faults_of("a").unwrap_err();
        assert!(error.contains("did you mean `write`?"), "{error}");
        for (text, words) in [
            ("lease_s = 0\n", "1 to 86400"),
            ("state = ''\n", "state is empty"),
            ("buffers_mib = 1\n", "8 to 1048576"),
            ("threads = 999999\n", "threads is a number up to 1024"),
            ("clients_max = 0\n", "would admit no client"),
            ("clients_of_one_address_max = 0\n", "would admit no client"),
            ("metrics = '9100'\n", "127.0.0.1:9100"),
            ("listen = ['tpc://x']\n", "listen: `tpc://x`"),
            (
                "[[export]]\nname='a'\ndir='/x'\nthreads=99999\n",
                "export `a`: threads is a number up to 1024, not `99999`",
            ),
            ("[[export]]\nname='a'\ndir='/x'\nsquash='rot'\n", "did you mean `root`?"),
            ("[[export]]\nname='a'\ndir='/x'\nmountpoint='ye'\n", "did you mean `yes`?"),
            ("[[export]]\nname='a'\nbackend='memory'\n", "export `a`: the backend memory replaces"),
            ("[[export]]\nname='a'\ndir='/x'\naudit={kinds=['x']}\n", "there are: all"),
            ("[audit.sink.a]\ntype='file'\n", "[audit.sink.a]: a sink into a file needs"),
            ("[[fault]]\none_in=0\n", "from 1 on"),
            ("[[fault]]\nerror='ENOSPACE'\n", "did you mean `ENOSPC`?"),
        ] {
            let error = Config::parse(text).unwrap().check().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_no_text_is_a_wrong_configuration() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"\xff\xfe").unwrap();
        let failure = Config::read(file.path()).unwrap_err();
        assert_eq!(failure.code, crate::error::EXIT_USAGE);
        assert!(failure.message.contains("not UTF-8"), "{}", failure.message);
    }

    #[test]
    fn faults_wait_to_be_switched_on() {
        let text = "[[fault]]\nexport='a'\nop='write'\nerror='ENOSPC'\nnth=3\n";
        assert!(Config::parse(text).unwrap().faults_of("a").unwrap().is_empty());
        let on = Config::parse(&format!("faults = true\n{text}")).unwrap();
        assert_eq!(on.faults_of("a").unwrap()[0].when, When::Nth(3));
        assert!(on.faults_of("b").unwrap().is_empty());
    }
}
