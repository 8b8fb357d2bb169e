//! The command line. Help, man pages and completions are made from these definitions.

// What stands here is shown to users: brackets mean what may be left out, not links.
#![allow(rustdoc::broken_intra_doc_links)]

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgAction, Parser, Subcommand, ValueHint};
use dray_client::Target;
use dray_fabric::Address;

use crate::error::EXIT_USAGE;
use crate::serve::export::ExportPlan;

mod administration;
mod audit;
mod cache;
mod examples;
mod helper;
mod measurements;
mod policy;
mod qos;
mod usage_error;

pub use administration::{AcceptArgs, DrainArgs, EvictArgs, QuiesceArgs, StatusArgs};
pub use audit::{
    AuditArgs, AuditCommand, ClearArgs, ConsumerArgs, FilterArgs, FollowArgs, LogArgs,
    RegisterArgs, SearchArgs, VerifyArgs,
};
pub use cache::{CacheCommand, CacheDir, CacheFiles};
pub use helper::helper_args;
pub use measurements::{DemoArgs, SurveyArgs};
pub use policy::{PolicyArgs, PolicyCommand, PolicyRunArgs};
pub use qos::{QosCommand, QosRemoveArgs, QosSetArgs, QosTopArgs};

/// Carries file I/O from the nodes that compute to the storage that a site already has.
#[derive(Debug, Parser)]
#[command(name = "dray", version, max_term_width = 100)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    /// Say more; twice for debugging. DRAY_LOG=error|warn|info|debug|trace has precedence
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = LAST)]
    pub verbose: u8,
    /// Errors only
    #[arg(short, long, global = true, display_order = LAST)]
    pub quiet: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Places the options of every subcommand behind its own ones in the help.
const LAST: usize = 500;

const EXIT_CODES: &str = "Exit codes:
  0   done
  1   it could not be done; the message says why
  2   wrong arguments or configuration, or a configuration or key file that cannot be read
  3   no server answered at the target
  4   the server refused: unknown export, wrong key, address not allowed, incompatible version

mount.dray, which mount(8) calls, ends with 1 for wrong arguments and 32 for every other failure,
as mount(8) wants it.";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    Serve(ServeArgs),
    Mount(MountArgs),
    /// Started by `serve`: holds deleted files that are open.
    #[command(hide = true)]
    KeepFiles {
        /// The server's state directory.
        state: PathBuf,
    },
    Umount(UmountArgs),
    Status(StatusArgs),
    Evict(EvictArgs),
    Drain(DrainArgs),
    Quiesce(QuiesceArgs),
    /// Keep files of a mount on the local disk: fetch them, pin them, see what is there
    Cache {
        /// What to do.
        #[command(subcommand)]
        command: CacheCommand,
    },
    Accept(AcceptArgs),
    Audit(AuditArgs),
    Policy(PolicyArgs),
    /// Share the bandwidth of a server's exports: set rules, remove them, see what each has
    Qos {
        /// What to do.
        #[command(subcommand)]
        command: QosCommand,
    },
    Upgrade(UpgradeArgs),
    Key(KeyArgs),
    /// Check a file of projections, or show what it means
    Projection {
        /// What to do.
        #[command(subcommand)]
        command: ProjectionCommand,
    },
    Reassemble(ReassembleArgs),
    Fsck(FsckArgs),
    Survey(SurveyArgs),
    Demo(DemoArgs),
    /// Print completions for a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// Made if need be
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// Holds a mount for its daemons; started by `mount`.
    #[command(hide = true)]
    MountSupervisor(MountSupervisorArgs),
    /// Serves a mount; started by its supervisor.
    #[command(hide = true)]
    MountDaemon(MountDaemonArgs),
    /// Sets a mount going again behind a daemon that died; started by its supervisor.
    #[command(hide = true)]
    WakeMount {
        /// Where it is.
        mountpoint: PathBuf,
    },
    /// Reclaims entries of a mount's ring; started by its supervisor.
    #[command(name = "gather-entries", hide = true)]
    ReclaimEntries {
        /// Where it is.
        mountpoint: PathBuf,
    },
    /// Has the kernel drop what other clients have changed; started by a mount's daemon.
    #[command(hide = true)]
    Invalidate,
}

/// Make plain files out of the disks of a projection whose servers have their own. No server is needed, and
/// disks of servers that run are refused.
#[derive(Debug, clap::Args)]
pub struct ReassembleArgs {
    /// The name of a projection, with --projections; else the directory of each server, in any order.
    /// Without --to, a directory that is not there yet follows, where the files go.
    #[arg(value_name = "PROJECTION|DISK", required = true, value_hint = ValueHint::DirPath)]
    pub which: Vec<PathBuf>,
    /// The file of projections, in which `%n` of the projection's path stands for each server's number
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub projections: Option<PathBuf>,
    /// Where the files go, if that is not the last argument: a directory that is not there yet
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub to: Option<PathBuf>,
    /// What was made, as JSON; no progress is shown
    #[arg(long)]
    pub json: bool,
}

/// Check the disks of a projection whose servers have their own: whether names and objects belong
/// together. Disks of servers that run are refused.
#[derive(Debug, clap::Args)]
pub struct FsckArgs {
    /// The name of a projection, with --projections; else the directory of each server, in any order
    #[arg(value_name = "PROJECTION|DISK", required = true, value_hint = ValueHint::DirPath)]
    pub which: Vec<PathBuf>,
    /// The file of projections, in which `%n` of the projection's path stands for each server's number
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub projections: Option<PathBuf>,
    /// Mend what can be mended without loss: objects that nobody has go to `orphans` on their disk
    #[arg(long)]
    pub repair: bool,
    /// As JSON; no progress is shown
    #[arg(long)]
    pub json: bool,
}

/// What to do with a file of projections.
#[derive(Debug, Subcommand)]
pub enum ProjectionCommand {
    /// Check a file: whether all is right in it, and whether the names of its servers have addresses
    Check(ProjectionFile),
    /// Show what a file means: which server has which share of files and directories
    Show(ProjectionFile),
}

/// A file of `[projection.NAME]` tables, as `dray serve --projections` reads it.
#[derive(Debug, clap::Args)]
pub struct ProjectionFile {
    /// The file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// This projection alone
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Serve directories to clients.
///
/// Must be started by root, since calls are carried out in the names of their callers. Ends
/// in good order on SIGTERM and SIGINT; clients wait for its return and go on.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::SERVE)]
pub struct ServeArgs {
    /// A directory to serve and its name; may be given several times.
    ///
    /// Options, separated by commas (a comma in DIR is written `\,`):
    ///
    ///   ro                    nothing can be changed
    ///   squash=root|all|none  whose calls are carried out as nobody's
    ///                         [default: root: those of a client's root]
    ///   anonuid=N, anongid=N  who nobody is
    ///   allow=ADDRESS[/BITS]  who may connect; further addresses follow
    ///                         behind commas [default: any that can
    ///                         reach the port]
    ///   insecure              without a key let ordinary users of clients
    ///                         in, too: any of them can be anybody
    ///   backend=posix|memory  what serves it [default: posix, the directory];
    ///                         memory is for tests, and has no directory:
    ///                         NAME=,backend=memory,squash=none
    ///   audit[=KIND+KIND...|all|change|denied|no]
    ///                         record changes, opens, closes and denied
    ///                         accesses (dray-audit(1)) [default: no]
    ///   audit_full=block|spill|drop
    ///                         what happens when the log has no room
    ///                         [default: block: new changes wait]
    ///   audit_spill=DIR       where old segments go then
    ///   audit_max=SIZE, audit_segment=SIZE
    ///                         of the log and of its files [default: 10G, 64M]
    ///   audit_readers=ADDRESS[/BITS]+...
    ///                         whose root may read it over the network; with
    ///                         squash=none that of each client may
    ///   leases[=yes|no]       lease names and attributes to mounts that want
    ///                         it; only if nothing but this server changes
    ///                         the files (dray-serve(8)) [default: no]
    ///   write_leases[=yes|no] lease writes, too [default: no]
    ///   lock_leases[=yes|no]  let a mount decide on fcntl(2) locks by itself
    ///                         as long as it alone uses them [default: no]
    ///   direct                pass O_DIRECT on to the file system below
    ///   inline=auto|always|never
    ///                         whether calls to it are made by the threads
    ///                         that serve connections [default: auto]
    ///   threads=N             threads for calls that block, of each kind [default: 16]
    ///   mountpoint[=yes|no|PATH]
    ///                         serve DIR only while something is mounted
    ///                         there, or at PATH, which DIR is in
    ///                         [default: no]
    #[arg(long, value_name = "NAME=DIR[,OPTION...]", value_parser = export_parser())]
    #[arg(verbatim_doc_comment)]
    pub export: Vec<ExportPlan>,
    /// Where to listen: tcp://ADDRESS[:PORT] or unix:///PATH; may be given several times.
    ///
    /// Without it only this machine is served, at tcp://127.0.0.1:7440: say where you want
    /// to be reached, for instance --listen tcp://0.0.0.0, once there is a key (`dray key`)
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<Address>,
    /// Configuration in TOML; what the command line says has precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The file that defines projections over several servers, the same at each of them; those that
    /// have this server are exported by their names
    #[arg(long, value_name = "FILE")]
    pub projections: Option<PathBuf>,
    /// Which of the `servers` of a projection this is, as written there [default: the one at whose
    /// address it listens]
    #[arg(long, value_name = "ADDRESS")]
    pub server: Option<String>,
    /// What clients must prove: none, or psk:FILE for a shared key [default: psk:/etc/dray/key
    /// if that is there, else none: then clients must come from ports below 1024]
    #[arg(long, value_name = "none|psk:FILE")]
    pub auth: Option<String>,
    /// Serve metrics for Prometheus at http://ADDR:PORT/metrics, and /healthz
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<String>,
    /// Where what must outlive the server is kept: identities of exports, sessions
    /// of clients [default: that below /var/lib/dray which knows the exports, else
    /// /var/lib/dray/main]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Threads that serve the connections of each export [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Count as another start of the machine: for tests of what a loss of power does.
    #[arg(long, value_name = "HEX", hide = true, value_parser = parse_boot)]
    pub boot_id: Option<u128>,
}

/// A directory is any bytes, not text.
fn export_parser() -> impl TypedValueParser<Value = ExportPlan> {
    OsStringValueParser::new().try_map(|text| ExportPlan::parse(&text))
}

/// Mount an export of a server.
///
/// Connects first: what is wrong is said at once and shows in the exit code. Works for root,
/// and for others through fusermount3. In /etc/fstab the type is `dray`.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::MOUNT)]
pub struct MountArgs {
    /// dray://HOST[:PORT]/NAME, dray://HOST,HOST/NAME of several servers, or dray+unix:///PATH?export=NAME
    #[arg(value_name = "TARGET", value_parser = TargetArgument::parse)]
    pub target: TargetArgument,
    /// An existing directory
    #[arg(value_name = "MOUNTPOINT")]
    pub mountpoint: PathBuf,
    /// Options, separated by commas; may be given several times.
    ///
    ///   ro, nosuid, nodev, noexec
    ///                         as for other file systems
    ///   remount               change ro, rw and the like of a mount that
    ///                         is there
    ///   timeout=SECONDS       how long calls wait for a server that is
    ///                         away before they fail with EHOSTDOWN
    ///                         [default: for ever; they can be killed]
    ///   retry=SECONDS         how long mounting itself tries to reach the
    ///                         server [default: one try]
    ///   consistency=strict|close-to-open|immutable
    ///                         what this mount sees of the changes of
    ///                         others, and when [default: strict]
    ///   attr_timeout=SECONDS  how long names and attributes are believed
    ///                         under close-to-open [default: 1]
    ///   leases=auto|yes|no    believe names and attributes under strict
    ///                         until the server recalls them: if the export
    ///                         has leases, always, or never [default: auto]
    ///   write_leases=yes|no   keep small writes until the close, a second at
    ///                         most, of files that nobody else looks at, if
    ///                         the export leases writes [default: no]
    ///   cache=DIR             keep what is read on a local disk
    ///                         (dray-cache(1)); strict needs an
    ///                         export with leases
    ///   cache_size=SIZE       how much it takes at most [default: 10G]
    ///   cache_rules=RULES     which files it keeps: conditions behind &,
    ///                         rules behind |, of path=PATTERN, ext=NAME,
    ///                         uid=N, gid=N, project=N, job=PATTERN,
    ///                         size>SIZE, size<SIZE, age>SECONDS and
    ///                         age<SECONDS [default: all]
    ///   cache_passthrough=yes|no
    ///                         the kernel reads by itself what the cache
    ///                         has whole, under immutable, and under
    ///                         close-to-open with ro [default: yes]
    ///   cache_write=through|back
    ///                         with back, writes to files that nobody else
    ///                         looks at are answered by that disk, and
    ///                         fsync, too, if the export leases writes
    ///                         [default: through]
    ///   cache_dirty=SIZE      how much the server does not have then at
    ///                         most; as much memory is used [default: 64M]
    ///   cache_dirty_age=SECONDS
    ///                         how long it does not have it at most
    ///                         [default: 30]
    ///   config=FILE           a file with a table [cache], whose dir,
    ///                         size, rules and passthrough are these
    ///                         options; what is said here has precedence
    ///   replay=SIZE           how much of what is written and not on media
    ///                         is kept, to be sent again if the server's
    ///                         machine loses power; 0: nothing
    ///                         [default: 64M]
    ///   auth=none|psk:FILE    the key that the server shares
    ///                         [default: psk:/etc/dray/key if you can
    ///                         read that, else none]
    ///   transport=auto|uring|classic
    ///                         FUSE over io_uring, or through /dev/fuse
    ///                         [default: auto: io_uring where the kernel
    ///                         offers it and is 6.18 or newer]
    ///   workers=N             threads [default: one for each CPU, at most
    ///                         4]
    ///   max_io=SIZE           the largest read or write that is one
    ///                         request [default: 1M]
    ///   metrics=ADDR:PORT     serve metrics for Prometheus at
    ///                         http://ADDR:PORT/metrics
    ///   allow_other           let other users use the mount (root's
    ///                         mounts do; see fusermount3(1))
    ///   noallow_other         a mount of root's for root alone
    ///   noshared_mmap         programs cannot map files to share what they
    ///                         store, which other mounts do not see
    ///
    /// Options that concern fstab alone (noauto, user, x-systemd.*) are
    /// accepted.
    #[arg(short = 'o', value_name = "OPTION,...", action = ArgAction::Append, value_hint = ValueHint::Other)]
    #[arg(verbatim_doc_comment)]
    pub options: Vec<String>,
    /// Stay in the foreground; SIGINT and SIGTERM unmount
    #[arg(short, long)]
    pub foreground: bool,
    /// Check only, do not mount (-f of mount(8)).
    #[arg(long, hide = true)]
    pub fake: bool,
    /// Called by mount(8), which has exit codes of its own.
    #[arg(long, hide = true)]
    pub helper: bool,
}

/// Make a key, by which servers and clients know each other.
///
/// Without FILE in /etc/dray/key, which `serve`, `mount` and `survey` use where it is there and
/// nothing else is said. Bring it to the clients by a way that keeps it secret. Anybody who can
/// read it can be any user. A key that is there already is left alone.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::KEY)]
pub struct KeyArgs {
    /// Where; it must not be there yet [default: /etc/dray/key]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// A target as it was written, which is what /proc/mounts shows: mount(8) knows a line of fstab
/// again by it.
#[derive(Clone, Debug)]
pub struct TargetArgument {
    /// As written.
    pub text: String,
    /// What it means.
    pub target: Target,
}

impl TargetArgument {
    fn parse(text: &str) -> Result<TargetArgument, String> {
        Ok(TargetArgument { text: text.to_owned(), target: text.parse()? })
    }
}

/// Unmount a mount of dray.
#[derive(Debug, clap::Args)]
pub struct UmountArgs {
    /// Where it is mounted
    #[arg(value_name = "MOUNTPOINT")]
    pub mountpoint: PathBuf,
    /// Take it out of the tree at once; it ends when its last user is gone
    #[arg(short, long)]
    pub lazy: bool,
}

/// Serve a mount with the program as it is installed now.
///
/// Applications notice a pause at most. If the new program does not come up, the former one
/// goes on. The same as SIGHUP to the mount's supervisor, but waits for the outcome.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::UPGRADE)]
#[group(required = true, multiple = false)]
pub struct UpgradeArgs {
    /// Where it is mounted
    #[arg(value_name = "MOUNTPOINT")]
    pub mountpoint: Option<PathBuf>,
    /// All mounts of this user, as a package does that brings a new program
    #[arg(long)]
    pub all: bool,
}

/// The arguments of the processes of a mount.
#[derive(Debug, clap::Args)]
pub struct ServedArgs {
    /// What is mounted.
    pub target: Target,
    /// Where; absolute.
    pub mountpoint: PathBuf,
    /// As given to `mount`.
    #[arg(short = 'o', action = ArgAction::Append)]
    pub options: Vec<String>,
    /// Clones of the device that are handed over: one for each thread.
    #[arg(long)]
    pub clones: usize,
    /// Stay in the foreground.
    #[arg(long)]
    pub foreground: bool,
}

/// Of the supervisor.
#[derive(Debug, clap::Args)]
pub struct MountSupervisorArgs {
    #[command(flatten)]
    pub mount: ServedArgs,
    /// The kernel's number of the connection.
    #[arg(long)]
    pub connection: u32,
    /// The program to upgrade to.
    #[arg(long)]
    pub program: PathBuf,
    /// Where it is to be found by other commands, which read this from /proc.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
}

/// Of a daemon.
#[derive(Debug, clap::Args)]
pub struct MountDaemonArgs {
    #[command(flatten)]
    pub mount: ServedArgs,
    /// Another daemon has served the mount before.
    #[arg(long)]
    pub successor: bool,
}

fn parse_count(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "a whole number is needed".to_owned())
}

fn parse_number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "a number such as 0.5 is needed".to_owned())
}

fn parse_boot(text: &str) -> Result<u128, String> {
    u128::from_str_radix(text, 16).map_err(|error| error.to_string())
}

/// The arguments of the command line. Ends the process where they are wrong, or ask for help.
pub fn own_args() -> Args {
    parse(std::env::args_os().collect(), i32::from(EXIT_USAGE))
}

fn parse(words: Vec<OsString>, code_if_wrong: i32) -> Args {
    Args::try_parse_from(&words).unwrap_or_else(|error| {
        let error = usage_error::with_advice(error, &words);
        let _ = error.print(); // to a closed stderr there is nothing to say
        std::process::exit(if error.use_stderr() { code_if_wrong } else { 0 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn numbers_that_are_none_are_refused_in_plain_words() {
        for (line, words) in [
            ("dray serve --export a=/a --threads x", "a whole number is needed"),
            ("dray serve --export a=/a --threads -1", "a whole number is needed"),
            ("dray survey /a --threads 1,x", "a whole number is needed"),
            ("dray survey /a --seconds 1s", "a number such as 0.5 is needed"),
            ("dray status --interval soon", "a number such as 0.5 is needed"),
            ("dray demo --mib 1G", "a whole number is needed"),
        ] {
            let error = Args::try_parse_from(line.split_whitespace()).unwrap_err().to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn a_directory_to_be_surveyed_is_any_bytes() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        let dir = OsStr::from_bytes(b"/srv/\xff");
        let args = Args::try_parse_from(["dray".as_ref(), "survey".as_ref(), dir]).unwrap();
        let Command::Survey(survey) = args.command else { panic!("not survey") };
        assert_eq!(survey.target, dir);
    }

    #[test]
    fn serve_takes_what_the_manual_promises() {
        let line = "dray serve --export a=/a,ro --export b=/b --listen tcp://0.0.0.0:1 \
                    --listen unix:///x --auth psk:/k --metrics 127.0.0.1:9 --state /s --threads 2";
        let args = Args::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Serve(serve) = args.command else { panic!("not serve") };
        assert_eq!((serve.export.len(), serve.listen.len(), serve.threads), (2, 2, Some(2)));
    }
}
