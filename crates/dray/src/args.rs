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

mod audit;
mod cache;
mod examples;
mod helper;
mod policy;
mod qos;
mod usage_error;

pub use audit::{
    AuditArgs, AuditCommand, ClearArgs, ConsumerArgs, FilterArgs, FollowArgs, LogArgs,
    RegisterArgs, SearchArgs, VerifyArgs,
};
pub use cache::{CacheCommand, CacheDir, CacheFiles};
pub use helper::helper_args;
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

/// Make plain files out of the disks of a projection whose servers have their own, without any server.
#[derive(Debug, clap::Args)]
pub struct ReassembleArgs {
    /// The directory of each server, all of them, in any order
    #[arg(value_name = "DISK", required = true, value_hint = ValueHint::DirPath)]
    pub disks: Vec<PathBuf>,
    /// Where the files go: a directory that is not there yet
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub to: PathBuf,
    /// What was made, as JSON; no progress is shown
    #[arg(long)]
    pub json: bool,
}

/// Check the disks of a projection whose servers have their own: whether names and objects belong
/// together. The servers must not run.
#[derive(Debug, clap::Args)]
pub struct FsckArgs {
    /// The directory of each server, all of them, in any order
    #[arg(value_name = "DISK", required = true, value_hint = ValueHint::DirPath)]
    pub disks: Vec<PathBuf>,
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
    /// dray://HOST[:PORT]/NAME or dray+unix:///PATH?export=NAME
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
    ///   leases=yes|no         believe names and attributes under strict
    ///                         until the server recalls them, if the export
    ///                         has leases, too [default: no]
    ///   cache=DIR             keep what is read on a local disk, under
    ///                         leases (dray-cache(1))
    ///   cache_size=SIZE       how much it takes at most [default: 10G]
    ///   cache_rules=RULES     which files it keeps: conditions behind &,
    ///                         rules behind |, of path=PATTERN, ext=NAME,
    ///                         uid=N, gid=N, project=N, job=PATTERN,
    ///                         size>SIZE, size<SIZE, age>SECONDS and
    ///                         age<SECONDS [default: all]
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

/// Show what servers and mounts of this machine are doing.
///
/// Exports, clients, operations in flight, rates over a short while, buffers in use. Root sees
/// the servers and mounts of everybody, others see their own mounts.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::STATUS)]
pub struct StatusArgs {
    /// A mount point or a path in a mount, an exported directory, the name of an export, a
    /// target (dray://HOST/NAME), or where a server listens (tcp://ADDRESS:PORT, a socket)
    /// [default: everything on this machine]
    #[arg(value_name = "TARGET")]
    pub target: Option<PathBuf>,
    /// One JSON object a line for each server and mount
    #[arg(long)]
    pub json: bool,
    /// Time over which rates are taken, seconds; 0: no rates
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = parse_number)]
    #[arg(allow_negative_numbers = true)]
    pub interval: f64,
}

/// End a client's session: its locks and open files are given back at once.
///
/// The client is notified, and its mount fails every call from then on, until it is unmounted and
/// mounted again; to keep it out, change allow= or the key.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::EVICT)]
pub struct EvictArgs {
    /// Session number or host name, as `dray status` shows them
    #[arg(value_name = "CLIENT")]
    pub client: String,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Move everything away from a server of a projection with failover.
///
/// The other servers take its share over, without an error for anybody, and it gets nothing back. The
/// command returns when the server serves nothing any more: now it can be stopped. The drain ends when
/// the server is started again, or with --undo. It is refused while some part has no other server that
/// could take it over.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::DRAIN)]
pub struct DrainArgs {
    /// The server, as `dray status` shows it; left out: the one of this machine
    #[arg(value_name = "SERVER")]
    pub server: Option<String>,
    /// Let the server have its share again
    #[arg(long)]
    pub undo: bool,
    /// State directory of the server to ask, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Have all servers of a projection with failover hold new calls, as for a snapshot.
///
/// The command returns when no call is under way at any of its servers, and what was written is on media.
/// Clients wait, without an error where their mounts have no timeout=, until --undo. Ctrl-C stops the
/// waiting alone.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::QUIESCE)]
pub struct QuiesceArgs {
    /// Name of the projection
    #[arg(value_name = "PROJECTION")]
    pub projection: String,
    /// Let calls go on
    #[arg(long)]
    pub undo: bool,
    /// State directory of the server to ask, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Serve an export from what is at its directory now.
///
/// A server holds an export back while another file system is there than the one that the export
/// was made on, and says so in its log and in `dray status`. If that one has been replaced for good,
/// this lets the export begin anew on what is there. Its clients have to mount anew.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::ACCEPT)]
pub struct AcceptArgs {
    /// Name of the export
    #[arg(value_name = "EXPORT")]
    pub export: String,
    /// State directory of the server, where several run on this machine
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Measure where the time goes.
///
/// Four cuts: the transport alone, the transport with a backend that does nothing, the
/// backend alone, the full path. Of a directory (needs root) the full path is that through a
/// mount of its own, of a target that without FUSE. The backend of a target or a mount is
/// measured where its server is on this machine, by root. Writes files of 32 MiB and removes them.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::SURVEY)]
pub struct SurveyArgs {
    /// A directory, a mount point or a directory in a mount, or a target such as dray://HOST/NAME
    #[arg(value_name = "TARGET|DIR")]
    pub target: PathBuf,
    /// One JSON object a line for each measurement
    #[arg(long)]
    pub json: bool,
    /// Time of each measurement, seconds
    #[arg(long, value_name = "SECONDS", default_value = "0.3", value_parser = parse_number)]
    #[arg(allow_negative_numbers = true)]
    pub seconds: f64,
    /// Create, stat and unlink files instead of reading and writing one; in one directory, and in one of each thread
    #[arg(long, conflicts_with = "block")]
    pub metadata: bool,
    /// Threads, each waiting for its answer before it asks again [default: 1,4; for metadata 1,4,16,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    #[arg(value_parser = parse_count, allow_negative_numbers = true)]
    pub threads: Vec<usize>,
    /// Block sizes, multiples of 4K up to 1M
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_values = ["4K", "64K", "1M"])]
    pub block: Vec<BlockSize>,
    /// For a target: none or psk:FILE [default: psk:/etc/dray/key if you can read that]
    #[arg(long, value_name = "none|psk:FILE")]
    pub auth: Option<String>,
}

/// Try it out: serve, mount, write, read back and compare.
///
/// All in a temporary directory, which is removed in the end. Needs root. Shows how fast it went.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Where the temporary directory is made [default: that of the system]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// How much is written
    #[arg(long, value_name = "MIB", default_value = "256", value_parser = parse_count)]
    #[arg(allow_negative_numbers = true)]
    pub mib: usize,
}

/// Bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize(pub usize);

impl std::str::FromStr for BlockSize {
    type Err = String;

    fn from_str(text: &str) -> Result<BlockSize, String> {
        let sound = |bytes: &u64| {
            *bytes > 0 && *bytes <= dray_core::IO_MAX_BYTES as u64 && bytes.is_multiple_of(4096)
        };
        let bytes = crate::mount::options::parse_size(text).ok().filter(sound);
        let bytes = bytes.ok_or_else(|| "a size is a multiple of 4K up to 1M".to_owned())?;
        Ok(BlockSize(bytes as usize))
    }
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
