//! `-o` options of a mount.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_cache::{CacheOptions, CacheRules};
use dray_client::{Key, LocalLogDisk, WriteBackOptions};
use dray_core::IO_MAX_BYTES;
use dray_fuse::{Consistency, MountFlags, TransportWish};

use crate::error::Failure;
use crate::metrics_http::check_address;
use crate::mount::foreign_options;
use crate::mount::option_names::{IGNORED, KNOWN, SHOWN_BY_THE_KERNEL};
use crate::mount::option_values::{
    lease_choice_name, parse_consistency, parse_lease_choice, parse_replay, parse_seconds,
    parse_timeout, parse_transport, parse_yes_no, transport_name,
};
use crate::paths;
use crate::serve::export::split_commas;
use crate::serve::parse_auth;
use crate::status::report::consistency_name;
use crate::suggestions::hint;

/// Whether a mount takes leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseChoice {
    /// If the export offers them when it is mounted. Its processes get `Yes` then. Those that have no such option have
    /// none.
    Auto,
    /// Yes, with a warning if the export offers none.
    Yes,
    /// No.
    No,
}

/// What `-o` says.
#[derive(Clone, Debug)]
pub struct MountPlan {
    /// How long calls wait for the server.
    pub timeout: Option<Duration>,
    /// What applications may rely on.
    pub consistency: Consistency,
    /// Transport to the kernel.
    pub transport: TransportWish,
    /// The shared key.
    pub key: Option<Key>,
    /// Where it is, as it was said; none: nothing was said.
    pub auth: Option<String>,
    /// Changes are refused.
    pub read_only: bool,
    /// Other users may use it; none: root's mounts yes, others' no.
    pub allow_other: Option<bool>,
    /// Files can be mapped by several programs that see each other's stores, and not those of other
    /// mounts.
    pub shared_mmap: bool,
    /// Whether under strict the server leases names and attributes, which the kernel believes meanwhile.
    pub leases: LeaseChoice,
    /// The server leases writes, too, which are kept here for a moment.
    pub write_leases: bool,
    /// The cache on a local disk.
    pub cache: Option<PathBuf>,
    /// Most bytes that it takes; none: [`CACHE_BYTES`].
    pub cache_bytes: Option<u64>,
    /// Writes under write leases are answered by that disk.
    pub cache_writes_back: bool,
    /// Most bytes that are there and not at the server.
    pub cache_dirty_bytes: u64,
    /// The longest time for that.
    pub cache_dirty_age: Duration,
    /// Which files it keeps, as it was said.
    pub cache_rules: Option<String>,
    /// The kernel may read by itself what is there whole.
    pub cache_passthrough: bool,
    /// How long attributes and names are believed under close-to-open.
    pub attr_validity: Duration,
    /// Unsynced writes kept for a server that loses power, bytes.
    pub replay_bytes: u64,
    /// Threads; 0: as many as is best.
    pub workers: usize,
    /// The largest read or write that is one request, bytes.
    pub io_bytes: u32,
    /// Set-id programs do not change identity.
    pub no_suid: bool,
    /// Devices are none.
    pub no_dev: bool,
    /// Nothing can be executed.
    pub no_exec: bool,
    /// Where metrics are served, `ADDR:PORT`.
    pub metrics: Option<String>,
    /// How long a server that cannot be reached is tried again before mounting fails.
    pub retry: Duration,
    /// The flags of a mount that is there are to be changed, no more.
    pub remount: bool,
}

impl Default for MountPlan {
    fn default() -> MountPlan {
        MountPlan {
            timeout: None,
            consistency: Consistency::Strict,
            transport: TransportWish::Auto,
            key: None,
            auth: None,
            read_only: false,
            allow_other: None,
            shared_mmap: true,
            leases: LeaseChoice::Auto,
            write_leases: false,
            cache: None,
            cache_bytes: None,
            cache_writes_back: false,
            cache_dirty_bytes: CACHE_DIRTY_BYTES,
            cache_dirty_age: Duration::from_secs(30),
            cache_rules: None,
            cache_passthrough: true,
            attr_validity: Duration::from_secs(1),
            replay_bytes: 64 << 20,
            workers: 0,
            io_bytes: IO_MAX_BYTES as u32,
            no_suid: false,
            no_dev: false,
            no_exec: false,
            metrics: None,
            retry: Duration::ZERO,
            remount: false,
        }
    }
}

/// Of a cache whose size is not said.
const CACHE_BYTES: u64 = 10 << 30;
/// Of what is not at the server. It is in memory, too, and a recall waits until that of one file is sent.
const CACHE_DIRTY_BYTES: u64 = 64 << 20;
const CACHE_DIRTY_MIN_BYTES: u64 = 1 << 20;
const CACHE_DIRTY_MAX_BYTES: u64 = 4 << 30;
/// Of smaller requests there are too many.
const IO_BYTES: RangeInclusive<u32> = 64 << 10..=IO_MAX_BYTES as u32;
/// A longer age is no use.
const CACHE_DIRTY_AGE_MAX: Duration = Duration::from_secs(3600);
/// Less is no use.
const CACHE_MIN_BYTES: u64 = 16 << 20;

/// Most threads of a mount.
const WORKERS_MAX: usize = 64;

/// From the value of `auth=` to the key.
pub type ReadKey<'a> = dyn FnMut(&str) -> Result<Option<Key>, Failure> + 'a;

impl MountPlan {
    /// From the lists behind `-o`.
    pub fn parse(lists: &[String]) -> Result<MountPlan, Failure> {
        MountPlan::parse_with(lists, &mut parse_auth)
    }

    /// The same; `auth` answers the key that the value of `auth=` stands for.
    pub fn parse_with(lists: &[String], auth: &mut ReadKey<'_>) -> Result<MountPlan, Failure> {
        let plan = MountPlan::parse_each(lists, auth)?;
        if plan.consistency == Consistency::Strict {
            if plan.cache.is_some() && plan.leases == LeaseChoice::No {
                let what = "mount option `cache`: under consistency=strict it needs leases, here and for the \
                            export at the server; leave out `leases=no`";
                return Err(Failure::usage(what.to_owned()));
            }
        } else if plan.leases == LeaseChoice::Yes {
            let what =
                "mount option `leases`: only consistency=strict has leases; leave one of them out";
            return Err(Failure::usage(what.to_owned()));
        }
        if plan.cache_writes_back && plan.cache.is_none() {
            let what =
                "mount option `cache_write=back`: it needs cache=DIR, a directory on a local disk";
            return Err(Failure::usage(what.to_owned()));
        }
        let unused = [
            ("cache_size", plan.cache_bytes.is_some()),
            ("cache_rules", plan.cache_rules.is_some()),
        ];
        if let Some((option, _)) = unused.iter().find(|(_, is_set)| *is_set && plan.cache.is_none())
        {
            let what =
                format!("mount option `{option}`: it needs cache=DIR, a directory on a local disk");
            return Err(Failure::usage(what));
        }
        Ok(plan)
    }

    /// The same, without a look at what goes together.
    pub fn parse_each(lists: &[String], auth: &mut ReadKey<'_>) -> Result<MountPlan, Failure> {
        let mut plan = MountPlan::default();
        let mut options: Vec<String> = lists.iter().flat_map(|list| split_commas(list)).collect();
        if options.iter().any(|option| option == "remount") {
            let key = |option: &str| option.split('=').next().unwrap_or_default().to_owned();
            options.retain(|option| !SHOWN_BY_THE_KERNEL.contains(&key(option).as_str()));
        }
        let mut options = options.iter().filter(|option| !option.is_empty());
        options.try_for_each(|one| plan.set(one, auth))?;
        let may_have = plan.consistency == Consistency::Strict && plan.leases != LeaseChoice::No;
        if plan.keeps_writes() && !may_have {
            let option = plan.keeping_option();
            let what = format!("mount option `{option}`: it needs consistency=strict and leases");
            return Err(Failure::usage(what));
        }
        Ok(plan)
    }

    /// Whether the mount has leases, as far as it is concerned.
    pub fn takes_leases(&self) -> bool {
        self.leases == LeaseChoice::Yes
    }

    /// Whether the export is asked for leases when it is mounted.
    pub fn asks_for_leases(&self) -> bool {
        self.consistency == Consistency::Strict && self.leases != LeaseChoice::No
    }

    /// Whether an export that offers none is worth a warning.
    pub fn counts_on_leases(&self) -> bool {
        self.asks_for_leases() && (self.takes_leases() || self.cache.is_some())
    }

    /// Whether writes are kept under write leases.
    pub fn keeps_writes(&self) -> bool {
        self.write_leases || self.cache_writes_back
    }

    /// The option by which they are kept.
    pub fn keeping_option(&self) -> &'static str {
        if self.write_leases { "write_leases" } else { "cache_write=back" }
    }

    /// How writes are kept on the local disk, for a daemon of this supervisor.
    pub fn write_back(&self, supervisor: u32) -> Option<WriteBackOptions> {
        let dir = self.cache.as_ref().filter(|_| self.cache_writes_back)?;
        Some(WriteBackOptions {
            dir: dirty_dir(dir),
            disk: Arc::new(LocalLogDisk),
            bytes_max: self.cache_dirty_bytes,
            age_max: self.cache_dirty_age,
            supervisor: Some(supervisor),
        })
    }

    /// Decides for good, by whether the export offers leases.
    pub fn settle_leases(&mut self, offered: bool) {
        self.leases = match self.asks_for_leases() && (offered || self.counts_on_leases()) {
            true => LeaseChoice::Yes,
            false => LeaseChoice::No,
        };
    }

    /// The cache that is wanted.
    pub fn cache_options(&self) -> Option<CacheOptions> {
        let rules = self.cache_rules.as_deref().and_then(|rules| CacheRules::parse(rules).ok());
        Some(CacheOptions {
            dir: self.cache.clone()?,
            size_bytes: self.cache_bytes.unwrap_or(CACHE_BYTES),
            rules: rules.unwrap_or_default(), // they were checked when they were read
        })
    }

    /// Whether the kernel may read by itself what the cache has whole. Only where an open file may go on with the
    /// version that was opened, and where this mount does not change it.
    pub fn passes_through(&self) -> bool {
        let may = match self.consistency {
            Consistency::Strict => false,
            Consistency::CloseToOpen => self.read_only,
            Consistency::Immutable => true,
        };
        may && self.cache_passthrough && self.cache.is_some()
    }

    /// The flags for mount(2).
    pub fn flags(&self) -> MountFlags {
        MountFlags {
            read_only: self.read_only,
            no_suid: self.no_suid,
            no_dev: self.no_dev,
            no_exec: self.no_exec,
        }
    }

    /// What a mount keeps until it ends, by the names of its options, always in this order.
    pub fn lasting(&self) -> Vec<(&'static str, String)> {
        let seconds = |time: Duration| time.as_secs_f64().to_string();
        let allow_other = self.allow_other.unwrap_or(paths::is_root());
        vec![
            ("consistency", consistency_name(self.consistency).to_owned()),
            ("timeout", self.timeout.map_or("never".to_owned(), seconds)),
            ("attr_timeout", seconds(self.attr_validity)),
            ("transport", transport_name(self.transport).to_owned()),
            ("replay", self.replay_bytes.to_string()),
            ("auth", self.auth.clone().unwrap_or_else(|| "none".to_owned())),
            ("workers", self.workers.to_string()),
            ("max_io", self.io_bytes.to_string()),
            ("metrics", self.metrics.clone().unwrap_or_else(|| "none".to_owned())),
            ("allow_other", if allow_other { "yes" } else { "no" }.to_owned()),
            ("shared_mmap", if self.shared_mmap { "yes" } else { "no" }.to_owned()),
            ("leases", lease_choice_name(self.leases).to_owned()),
            ("write_leases", if self.write_leases { "yes" } else { "no" }.to_owned()),
            ("cache", none_or(self.cache.as_ref().map(|dir| dir.display().to_string()))),
            ("cache_size", self.cache_bytes.unwrap_or(CACHE_BYTES).to_string()),
            ("cache_write", if self.cache_writes_back { "back" } else { "through" }.to_owned()),
            ("cache_dirty", self.cache_dirty_bytes.to_string()),
            ("cache_dirty_age", seconds(self.cache_dirty_age)),
            ("cache_rules", none_or(self.cache_rules.clone())),
            ("cache_passthrough", if self.cache_passthrough { "yes" } else { "no" }.to_owned()),
        ]
    }

    fn set(&mut self, option: &str, auth: &mut ReadKey<'_>) -> Result<(), Failure> {
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (option, None),
        };
        if key.starts_with("x-") || key.starts_with("X-") || key == "comment" {
            return Ok(());
        }
        // mount(8) notes who mounted, and which helper unmounts, for itself.
        if matches!(key, "user" | "uhelper" | "helper") && value.is_some() {
            self.ignored(key);
            return Ok(());
        }
        let wrong = |what: &str| Failure::usage(format!("mount option `{option}`: {what}"));
        let needed = || value.ok_or_else(|| wrong("it needs a value"));
        match key {
            "timeout" => self.timeout = parse_timeout(needed()?).map_err(|what| wrong(&what))?,
            "attr_timeout" => {
                self.attr_validity = parse_seconds(needed()?).map_err(|what| wrong(&what))?;
            }
            "consistency" => {
                self.consistency = parse_consistency(needed()?).map_err(|w| wrong(&w))?
            }
            "write_leases" => {
                let value = value.unwrap_or("yes");
                self.write_leases = parse_yes_no(value).map_err(|what| wrong(&what))?;
            }
            "leases" => {
                self.leases =
                    parse_lease_choice(value.unwrap_or("yes")).map_err(|what| wrong(&what))?
            }
            "cache" => {
                let dir = PathBuf::from(needed()?);
                if !dir.is_absolute() {
                    return Err(wrong("the absolute path of a directory is needed"));
                }
                self.cache = Some(dir);
            }
            "cache_size" => {
                let bytes =
                    dray_cache::parse_size(needed()?).filter(|bytes| *bytes >= CACHE_MIN_BYTES);
                let wrong_size = || wrong("a size such as 200G is needed, 16M or more");
                self.cache_bytes = Some(bytes.ok_or_else(wrong_size)?);
            }
            "cache_rules" => {
                CacheRules::parse(needed()?).map_err(|what| wrong(&what))?;
                self.cache_rules = value.map(str::to_owned);
            }
            "cache_passthrough" => {
                self.cache_passthrough =
                    parse_yes_no(value.unwrap_or("yes")).map_err(|what| wrong(&what))?
            }
            "cache_write" => {
                self.cache_writes_back = match needed()? {
                    "through" => false,
                    "back" => true,
                    _ => return Err(wrong("through or back is needed")),
                }
            }
            "cache_dirty" => {
                let range = CACHE_DIRTY_MIN_BYTES..=CACHE_DIRTY_MAX_BYTES;
                let bytes = dray_cache::parse_size(needed()?).filter(|bytes| range.contains(bytes));
                self.cache_dirty_bytes =
                    bytes.ok_or_else(|| wrong("a size such as 64M is needed, from 1M to 4G"))?;
            }
            "cache_dirty_age" => {
                let age = parse_seconds(needed()?).map_err(|what| wrong(&what))?;
                if age > CACHE_DIRTY_AGE_MAX {
                    return Err(wrong("at most 3600 seconds"));
                }
                self.cache_dirty_age = age;
            }
            "config" => return Err(wrong("it is not read here")),
            "transport" => {
                self.transport = parse_transport(needed()?).map_err(|what| wrong(&what))?
            }
            "replay" => self.replay_bytes = parse_replay(needed()?).map_err(|what| wrong(&what))?,
            "auth" => {
                self.key = auth(needed()?)?;
                self.auth = value.map(str::to_owned);
            }
            "retry" => self.retry = parse_seconds(needed()?).map_err(|what| wrong(&what))?,
            "metrics" => {
                check_address(needed()?).map_err(|what| wrong(&what))?;
                self.metrics = value.map(str::to_owned);
            }
            "workers" => {
                let count = needed()?.parse().ok().filter(|count| *count <= WORKERS_MAX);
                self.workers = count.ok_or_else(|| wrong("a number up to 64 is needed"))?;
            }
            "max_io" => {
                let bytes =
                    dray_cache::parse_size(needed()?).and_then(|bytes| u32::try_from(bytes).ok());
                let bytes =
                    bytes.filter(|bytes| IO_BYTES.contains(bytes) && bytes.is_multiple_of(4096));
                self.io_bytes =
                    bytes.ok_or_else(|| wrong("a multiple of 4K is needed, from 64K to 1M"))?;
            }
            _ if value.is_some() => return Err(unknown(option, key)),
            "remount" => self.remount = true,
            "sync" | "dirsync" => {
                return Err(wrong("not offered: let programs sync what must be on media"));
            }
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            "shared_mmap" | "noshared_mmap" => self.shared_mmap = key == "shared_mmap",
            "suid" | "nosuid" => self.no_suid = key == "nosuid",
            "dev" | "nodev" => self.no_dev = key == "nodev",
            "exec" | "noexec" => self.no_exec = key == "noexec",
            _ if IGNORED.contains(&key) => self.ignored(key),
            _ => return Err(unknown(option, key)),
        }
        Ok(())
    }

    /// `user` and its like also restrict what can be run, as mount(8) says.
    fn ignored(&mut self, key: &str) {
        if matches!(key, "user" | "users") {
            (self.no_exec, self.no_suid, self.no_dev) = (true, true, true);
        }
        if matches!(key, "owner" | "group") {
            (self.no_suid, self.no_dev) = (true, true);
        }
    }
}

/// Where in a cache that is which the server does not have yet.
pub(crate) fn dirty_dir(cache: &Path) -> PathBuf {
    cache.join("dirty")
}

fn unknown(option: &str, key: &str) -> Failure {
    let hint = match foreign_options::of_a_mount(key) {
        Some(instead) => format!(": {instead}"),
        None => hint(key, KNOWN),
    };
    Failure::usage(format!("unknown mount option `{option}`{hint}"))
}

fn none_or(value: Option<String>) -> String {
    value.unwrap_or_else(|| "none".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::option_names::OFFERED;

    fn parse(text: &str) -> Result<MountPlan, Failure> {
        MountPlan::parse(&[text.to_owned()])
    }

    #[test]
    fn options_are_read() {
        let plan =
            parse("timeout=2.5,consistency=close-to-open,ro,replay=2G,transport=uring").unwrap();
        assert_eq!(plan.timeout, Some(Duration::from_millis(2500)));
        assert_eq!(plan.consistency, Consistency::CloseToOpen);
        assert_eq!((plan.read_only, plan.replay_bytes), (true, 2 << 30));
        assert_eq!(plan.transport, TransportWish::Uring);
        for (text, bytes) in [("0", 0), ("64K", 64 << 10), ("1", 1), ("1048576", 1 << 20)] {
            assert_eq!(
                parse(&format!("replay={text}")).map(|plan| plan.replay_bytes).ok(),
                (bytes != 1).then_some(bytes)
            );
        }
        let plan = parse("timeout=0,attr_timeout=10s,allow_other,workers=2").unwrap();
        assert_eq!((plan.timeout, plan.allow_other, plan.workers), (None, Some(true), 2));
        assert_eq!(plan.attr_validity, Duration::from_secs(10));
        assert!(plan.shared_mmap && !parse("ro,noshared_mmap").unwrap().shared_mmap);
    }

    // proves: P267
    #[test]
    fn the_kernel_reads_the_cache_where_open_files_need_not_change() {
        for (text, may) in [
            ("leases=yes,cache=/c", false),
            ("consistency=close-to-open,cache=/c", false),
            ("consistency=close-to-open,cache=/c,ro", true),
            ("consistency=immutable,cache=/c", true),
            ("consistency=immutable,cache=/c,cache_passthrough=no", false),
            ("consistency=immutable", false),
        ] {
            assert_eq!(parse(text).unwrap().passes_through(), may, "{text}");
        }
        assert!(parse("cache=/c,leases=no").unwrap_err().message.contains("leases=no"));
    }

    /// Who says nothing has leases where they are offered, and nothing else of the mount changes where they are not.
    #[test]
    fn leases_are_taken_if_they_are_offered_and_not_refused() {
        for (text, offered, taken) in [
            ("", true, true),
            ("", false, false),
            ("leases=auto", true, true),
            ("leases=yes", false, true),
            ("leases=no", true, false),
            ("cache=/c", false, true),
            ("consistency=close-to-open", true, false),
            ("consistency=immutable,leases=auto", true, false),
        ] {
            let mut plan = parse(text).unwrap();
            plan.settle_leases(offered);
            assert_eq!(plan.takes_leases(), taken, "{text}, offered: {offered}");
        }
        assert!(!parse("").unwrap().takes_leases(), "processes that were given nothing");
        assert!(parse("consistency=immutable,leases=yes").is_err());
    }

    #[test]
    fn what_is_offered_is_all_there_is_and_is_taken() {
        let key = |word: &'static str| word.split('=').next().unwrap();
        let offered: Vec<&str> = OFFERED.into_iter().map(key).collect();
        assert!(KNOWN.iter().all(|known| offered.contains(known)), "{offered:?}");
        for word in OFFERED.into_iter().filter(|word| !word.ends_with(['=', ':'])) {
            parse(word).unwrap();
        }
    }

    #[test]
    fn what_stands_in_fstab_for_others_is_accepted() {
        let plan = parse(
            "rw,defaults,noauto,_netdev,nofail,x-systemd.automount,x-systemd.mount-timeout=30s,\
             nosuid,nodev,noatime,comment=mine,,",
        )
        .unwrap();
        assert!(plan.no_suid && plan.no_dev && !plan.no_exec);
        assert!(parse("user=joe,_rnetdev,uhelper=dray").unwrap().no_exec);
        parse("norelatime,nostrictatime,diratime,nolazytime,loud,nomand,noiversion").unwrap();
        let plan = parse("retry=90,metrics=127.0.0.1:9101,remount").unwrap();
        assert_eq!((plan.retry, plan.remount), (Duration::from_secs(90), true));
        assert_eq!(plan.metrics.as_deref(), Some("127.0.0.1:9101"));
        parse("rw,relatime,user_id=0,group_id=0,max_read=1048576,remount,ro").unwrap();
        assert!(parse("rw,user_id=0").is_err());
        let plan = parse("user,exec").unwrap();
        assert!(plan.no_suid && plan.no_dev && !plan.no_exec);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, hint) in [
            ("timeot=3", "did you mean `timeout`?"),
            ("timeout", "needs a value"),
            ("timeout=-1", "seconds"),
            ("timeout=1e300", "seconds"),
            ("timeout=nan", "seconds"),
            ("consistency=strikt", "did you mean `strict`?"),
            ("transport=tcp", "auto, uring or classic"),
            ("replay=1T", "size"),
            ("replay=99999999999G", "size"),
            ("ro=1", "unknown"),
            ("auth=psk:/nowhere/key", "/nowhere/key"),
            ("auth=kerberos", "psk:FILE"),
            ("metrics=9100", "ADDR:PORT"),
            ("retry=soon", "seconds"),
            ("sync", "not offered"),
            ("zz", "unknown mount option `zz`; there are: timeout"),
            ("xyz", "unknown mount option `xyz`; there are: timeout"),
            ("cto", "unknown mount option `cto`: by default (consistency=strict)"),
            ("noac", "`noac`: attr_timeout=SECONDS under consistency=close-to-open says how"),
            ("actimeo=3", "attr_timeout=SECONDS under consistency=close-to-open"),
            ("soft", "timeout=SECONDS has them fail"),
            ("vers=4.2", "unknown mount option `vers=4.2`: client and server agree"),
            ("bg", "retry=SECONDS"),
            ("cache_write=back", "it needs cache=DIR"),
            ("cache_size=10G", "`cache_size`: it needs cache=DIR"),
            ("cache_rules=ext=so", "`cache_rules`: it needs cache=DIR"),
            (
                "cache_write=back,cache=/c,leases=no",
                "`cache_write=back`: it needs consistency=strict and leases",
            ),
            ("cache_write=soon,cache=/c", "through or back"),
            ("cache_dirty=10", "from 1M to 4G"),
            ("cache_dirty_age=4000", "at most 3600"),
            ("replay=64", "without a unit it is 64 bytes; say 64M, 64K, or 0"),
            ("replay=1048575", "without a unit"),
            ("workers=1000", "up to 64"),
            ("max_io=32K", "from 64K to 1M"),
            ("max_io=2M", "from 64K to 1M"),
            ("max_io=65537", "a multiple of 4K"),
            ("wsize=131072", "max_io=SIZE"),
        ] {
            let failure = parse(text).unwrap_err();
            assert!(failure.message.contains(hint), "{text}: {}", failure.message);
            assert_eq!(failure.code, crate::error::EXIT_USAGE);
        }
    }
}
