//! Generated sequences through real mounts: a served ext4 or tmpfs, one and two mounts, both
//! transports to the kernel, against the model.
//!
//! Needs root and a compiled `dray`, named by `DRAY_BINARY`, which a step of script/test of its
//! own does; else the tests say so and pass.

use std::any::Any;
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use dray_backends::posix::{self, PosixFs, PosixOptions, Squash};
use dray_core::{Context, FileSystem, FsUuid, Name};
use dray_fabric::{Address, Connect, listen_first, local};
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::sync::oneshot;
use dray_testkit::conformance::{FrontEnds, FsTarget, PathTarget, StepTarget, run};
use dray_testkit::fixture::{
    self, Ext4, Image, Killer, MountGuard, TempDir, Tmpfs, block_on, skipped_without_root, wait_for,
};
use dray_testkit::model::Quirks;
use dray_testkit::step::{Step, sequences};

/// Steps of one sequence.
const STEPS: std::ops::Range<usize> = 1..120;
/// A server or mount that takes longer to start does not start.
const START_MAX: Duration = Duration::from_secs(60);
/// The kernel's switch for FUSE over io_uring.
const RING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The binary to test, if this process may mount.
fn binary() -> Option<OsString> {
    let binary = std::env::var_os("DRAY_BINARY");
    if binary.is_none() {
        eprintln!("elsewhere: DRAY_BINARY is not set");
    }
    binary.filter(|_| !skipped_without_root())
}

/// Whether rings can be had: the switch is set by who runs the tests.
fn rings_are_on() -> bool {
    let on = std::fs::read_to_string(RING_SWITCH).is_ok_and(|text| text.starts_with('Y'));
    if !on {
        eprintln!("skipped: FUSE over io_uring is off, or this kernel has none");
    }
    on
}

/// A server on a directory, and mounts of it. Ended in order: mounts, their daemons, server.
struct Rig {
    roots: Vec<PathBuf>,
    _guards: Vec<MountGuard>,
    _daemons: Vec<Killer>,
    _server: Box<dyn Any>,
    _dir: TempDir,
}

impl Rig {
    fn new(binary: &OsString, served: &Path, options: &str, mounts: usize) -> Rig {
        let dir = TempDir::new("mounts").expect("a temporary directory");
        let socket = dir.path().join("socket");
        let export =
            format!("test={},squash=none,leases,write_leases,lock_leases", served.display());
        let mut server = Command::new(binary);
        server.arg("serve").args(["--export", &export]);
        server.arg("--listen").arg(format!("unix://{}", socket.display()));
        server.arg("--state").arg(dir.path().join("state"));
        let server = Killer::new(start(&mut server));
        // The server's socket is there a moment before the server listens.
        let listens = || UnixStream::connect(&socket).is_ok();
        assert!(wait_for(START_MAX, listens), "the server does not start");
        let mut rig = Rig::of(Box::new(server), dir);
        for number in 0..mounts {
            rig.mount(binary, &socket, options, number);
        }
        rig
    }

    /// Three servers of a projection of this layout. They share `served`, or `%n` in it makes a directory for each.
    fn projected(binary: &OsString, served: &Path, layout: &str, mounts: (usize, &str)) -> Rig {
        let dir = TempDir::new("mounts").expect("a temporary directory");
        let sockets = [1, 2, 3].map(|number| dir.path().join(format!("socket{number}")));
        let names = sockets.each_ref().map(|socket| format!("'unix://{}'", socket.display()));
        let definition = format!(
            "[projection.test]\n{layout}\nservers = [{}]\npath = '{}'\nexport = {{ squash = 'none' }}\n",
            names.join(", "),
            served.display()
        );
        let file = dir.path().join("projections.toml");
        std::fs::write(&file, definition).expect("a file");
        let servers: Vec<Killer> = sockets
            .iter()
            .zip(1..)
            .map(|(socket, number)| {
                let mut server = Command::new(binary);
                server.arg("serve").arg("--projections").arg(&file);
                server.arg("--listen").arg(format!("unix://{}", socket.display()));
                server.arg("--state").arg(dir.path().join(format!("state{number}")));
                let server = Killer::new(start(&mut server));
                let listens = || UnixStream::connect(socket).is_ok();
                assert!(wait_for(START_MAX, listens), "server {number} does not start");
                server
            })
            .collect();
        let mut rig = Rig::of(Box::new(servers), dir);
        let (count, options) = mounts;
        (0..count).for_each(|number| rig.mount(binary, &sockets[number], options, number));
        rig
    }

    fn of(server: Box<dyn Any>, dir: TempDir) -> Rig {
        let (roots, guards, daemons) = (Vec::new(), Vec::new(), Vec::new());
        Rig { roots, _guards: guards, _daemons: daemons, _server: server, _dir: dir }
    }

    fn mount(&mut self, binary: &OsString, socket: &Path, options: &str, number: usize) {
        let at = self._dir.subdir(&format!("mnt{number}")).expect("a mount point");
        let target = format!("dray+unix://{}?export=test", socket.display());
        let mut mount = Command::new(binary);
        mount.arg("mount").arg(target).arg(&at).arg("--foreground");
        mount.args(["-o", options]);
        self._daemons.push(Killer::new(start(&mut mount)));
        self._guards.push(MountGuard::new(&at));
        assert!(wait_for(START_MAX, || is_mounted(&at)), "the mount does not start");
        self.roots.push(at);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // A mount that ends by itself leaves nothing behind for its daemon to complain about.
        self._guards.clear();
    }
}

fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).spawn().expect("the binary starts")
}

fn is_mounted(at: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    table.lines().any(|line| line.split(' ').nth(1) == at.to_str()) && at.read_dir().is_ok()
}

/// Runs generated sequences, each in a directory of its own.
fn agree(served: &Path, options: &str, mounts: usize, default_cases: u32) {
    // The export has them, and a mount takes what there is.
    let options = format!("{options},leases=no");
    agree_as(Quirks::mounted(), served, &options, mounts, default_cases);
}

fn agree_as(quirks: Quirks, served: &Path, options: &str, mounts: usize, default_cases: u32) {
    let Some(binary) = binary() else { return };
    let rig = Rig::new(&binary, served, options, mounts);
    fixture::generated(&sequences(STEPS), default_cases, 2_000, |steps| case(&rig, quirks, &steps));
}

fn case(rig: &Rig, quirks: Quirks, steps: &[Step]) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    let dirs: Vec<PathBuf> = rig.roots.iter().map(|root| root.join("case")).collect();
    std::fs::create_dir(&dirs[0]).map_err(words)?;
    let roots: Vec<&Path> = dirs.iter().map(PathBuf::as_path).collect();
    let mut target = PathTarget::new(&roots, quirks).map_err(words)?;
    let result = block_on(run(&mut target, steps));
    drop(target);
    std::fs::remove_dir_all(&dirs[0]).map_err(words)?;
    result.map_err(|divergence| format!("{divergence:?}"))
}

fn on_ext4(transport: &str, mounts: usize, default_cases: u32) {
    if binary().is_none() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").expect("an ext4");
    agree(ext4.path(), &format!("transport={transport}"), mounts, default_cases);
}

// proves: P3
#[test]
fn a_mount_agrees_with_the_model_classic() {
    on_ext4("classic", 1, 150);
}

// proves: P3
#[test]
fn a_mount_agrees_with_the_model_uring() {
    if rings_are_on() {
        on_ext4("uring", 1, 150);
    }
}

// proves: P1
#[test]
fn two_mounts_interleaved_agree_with_the_model_classic() {
    on_ext4("classic", 2, 150);
}

// proves: P1
#[test]
fn two_mounts_interleaved_agree_with_the_model_uring() {
    if rings_are_on() {
        on_ext4("uring", 2, 150);
    }
}

const EXPORT: &str = "test";

/// A server on a thread of this process.
struct ServerThread {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ServerThread {
    /// Serves a directory at `socket`, and within the process; answers the way there.
    fn start(served: &Path, socket: &Path) -> (ServerThread, Arc<dyn Connect>) {
        let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
        let fs = PosixFs::open(served, FsUuid(7), options).expect("it can be served");
        let export = Export::new(EXPORT, fs, Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let address = Address::Unix(socket.to_owned());
        let (listener, connector) = local::listen();
        let (end, ended) = oneshot::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            block_on(async {
                let within = server.clone();
                dray_rt::spawn(async move { drop(within.serve_all(Box::new(listener)).await) });
                let listener = listen_first(&address).await.expect("a socket").listener;
                dray_rt::spawn(async move { drop(server.serve_all(listener).await) });
                sender.send(()).expect("the starting thread waits");
                let _ = ended.await; // dropped or not, it is over
            });
            posix::release().expect("this thread is nobody else any more");
        });
        receiver.recv().expect("it starts");
        (ServerThread { end: Some(end), thread: Some(thread) }, Arc::new(connector))
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

/// The same steps through a mount and through a session within the server's process, in turn.
fn two_front_ends(transport: &str) {
    let Some(binary) = binary() else { return };
    let ext4 = Ext4::new(64 << 20, "").expect("an ext4");
    let dir = TempDir::new("mounts").expect("a temporary directory");
    let socket = dir.path().join("socket");
    let (server, connector) = ServerThread::start(ext4.path(), &socket);
    let mut rig = Rig::of(Box::new(server), dir);
    rig.mount(&binary, &socket, &format!("transport={transport}"), 0);
    fixture::generated(&sequences(STEPS), 100, 2_000, |steps| {
        let dir = rig.roots[0].join("case");
        std::fs::create_dir(&dir).map_err(|error| error.to_string())?;
        let result = block_on(through_both(&dir, connector.clone(), &steps));
        std::fs::remove_dir_all(&dir).map_err(|error| error.to_string())?;
        result
    });
}

/// `mounted`: where the mount has the directory `case` of the export.
async fn through_both(
    mounted: &Path,
    connector: Arc<dyn Connect>,
    steps: &[Step],
) -> Result<(), String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let options = ClientOptions {
        export: EXPORT.into(),
        key: None,
        timeout: Some(START_MAX),
        host: "within".into(),
        replay_bytes: 1 << 20,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: false,
        counts_on_one_user: false,
        leases: LeaseWish::No,
        lease_share: None,
        definition: 0,
        group: None,
        aside: None,
        write_back: None,
    };
    let session = ClientSession::connect(connector, options, SessionMemory::heap()).await;
    let session = session.map_err(|error| words(&error))?;
    let fs: Arc<dyn FileSystem> = Arc::new(RemoteFs::new(session.clone()));
    let name = Name::new(b"case").expect("it is a name");
    let case = fs.lookup(&Context::system(), fs.info().root, name).await;
    let case = case.map_err(|error| words(&error))?.id;
    let quirks = Quirks::mounted();
    let mount = PathTarget::new(&[mounted], quirks).map_err(|error| words(&error))?;
    let targets: Vec<Box<dyn StepTarget>> =
        vec![Box::new(mount), Box::new(FsTarget::at(case, vec![fs], quirks))];
    let result = run(&mut FrontEnds::new(targets, quirks), steps).await;
    session.goodbye(); // what is open there is closed
    result.map_err(|divergence| format!("{divergence:?}"))
}

#[test]
fn a_mount_and_a_session_within_the_server_agree_with_the_model_classic() {
    two_front_ends("classic");
}

#[test]
fn a_mount_and_a_session_within_the_server_agree_with_the_model_uring() {
    if rings_are_on() {
        two_front_ends("uring");
    }
}

/// Mounts that believe what is leased to them see each other's changes as others do.
fn leased(served: &Path, transport: &str, mounts: usize, default_cases: u32) {
    let options = format!("transport={transport},leases=yes");
    agree_as(Quirks::kernel(), served, &options, mounts, default_cases);
}

// proves: P220
#[test]
fn two_mounts_under_leases_agree_with_the_model_classic() {
    if binary().is_some() {
        let ext4 = Ext4::new(64 << 20, "").expect("an ext4");
        leased(ext4.path(), "classic", 2, 8);
    }
}

// proves: P220
#[test]
fn three_mounts_under_leases_agree_with_the_model_uring() {
    if binary().is_some() && rings_are_on() {
        let tmpfs = Tmpfs::new(64 << 20).expect("a tmpfs");
        leased(tmpfs.path(), "uring", 3, 8);
    }
}

// proves: P257, P283
#[test]
fn two_mounts_that_keep_writes_agree_with_the_model_classic() {
    if binary().is_some() {
        let ext4 = Ext4::new(64 << 20, "").expect("an ext4");
        let options = "transport=classic,leases=yes,write_leases=yes";
        agree_as(Quirks::kernel(), ext4.path(), options, 2, 8);
    }
}

// proves: P315, P319
#[test]
fn two_mounts_that_write_back_agree_with_the_model_classic() {
    if binary().is_some() {
        let ext4 = Ext4::new(64 << 20, "").expect("an ext4");
        let cache = TempDir::new("cache").expect("a temporary directory");
        let cache = cache.path().join("cache").display().to_string();
        let options = format!("transport=classic,cache={cache},cache_write=back,cache_dirty=1M");
        agree_as(Quirks::kernel(), ext4.path(), &options, 2, 8);
    }
}

/// Three at a time, on a tmpfs.
fn three_mounts(transport: &str) {
    if binary().is_none() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).expect("a tmpfs");
    agree(tmpfs.path(), &format!("transport={transport}"), 3, 80);
}

// proves: P2
#[test]
fn three_mounts_of_a_tmpfs_agree_with_the_model_classic() {
    three_mounts("classic");
}

// proves: P2
#[test]
fn three_mounts_of_a_tmpfs_agree_with_the_model_uring() {
    if rings_are_on() {
        three_mounts("uring");
    }
}

/// Two and three mounts of a projection over three servers, each named by another server.
fn projected(layout: &str, transport: &str) {
    projected_as(Quirks::mounted(), (layout, 25), &format!("transport={transport}"));
}

fn projected_as(quirks: Quirks, (layout, cases): (&str, u32), options: &str) {
    let Some(binary) = binary() else { return };
    let tmpfs = Tmpfs::new(64 << 20).expect("a tmpfs");
    for mounts in [2, 3] {
        let served = tmpfs.path().join(mounts.to_string());
        std::fs::create_dir(&served).expect("a directory");
        agree_projected(&binary, &served, quirks, (layout, cases), (mounts, options));
    }
}

/// The same over three directories, each of which is the disk of one server.
fn on_own_disks(layout: &str, transport: &str) {
    let Some(binary) = binary() else { return };
    let disks = Ext4::new(256 << 20, "").expect("an ext4");
    let own = disks.path().join("disk%n");
    (1..=3).for_each(|number| {
        let disk = disks.path().join(format!("disk{number}"));
        std::fs::create_dir(disk).expect("a directory");
    });
    let options = format!("transport={transport}");
    agree_projected(&binary, &own, Quirks::mounted(), (layout, 15), (2, &options));
}

fn agree_projected(
    binary: &OsString,
    served: &Path,
    quirks: Quirks,
    (layout, cases): (&str, u32),
    mounts: (usize, &str),
) {
    let rig = Rig::projected(binary, served, layout, mounts);
    fixture::generated(&sequences(STEPS), cases, 1_000, |steps| case(&rig, quirks, &steps));
}

// proves: P139
#[test]
fn mounts_of_a_cluster_agree_with_the_model_classic() {
    projected("layout = 'cluster'", "classic");
}

// proves: P271
#[test]
fn mounts_of_a_cluster_under_leases_agree_with_the_model_classic() {
    let layout = ("layout = 'cluster'\nleases = true", 4);
    projected_as(Quirks::kernel(), layout, "transport=classic,leases=yes");
}

// proves: P150
#[test]
fn mounts_of_a_striped_cluster_agree_with_the_model_uring() {
    if rings_are_on() {
        projected("layout = 'cluster-stripe'\nstripe = '4K'", "uring");
    }
}

// proves: P170
#[test]
fn mounts_of_files_on_own_disks_agree_with_the_model_classic() {
    on_own_disks("layout = 'file'", "classic");
}

// proves: P170
#[test]
fn mounts_of_stripes_on_own_disks_agree_with_the_model_uring() {
    if rings_are_on() {
        on_own_disks("layout = 'stripe'\nstripe = '4K'", "uring");
    }
}

/// Alone on its export a mount that caches is as good as a local directory. Its kernel checks
/// rights, in the order in which it always does.
// proves: P4
#[test]
fn a_close_to_open_mount_alone_agrees_with_the_model() {
    if binary().is_none() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").expect("an ext4");
    agree_as(Quirks::kernel(), ext4.path(), "consistency=close-to-open", 1, 100);
}

/// Two mounts of an image of another kind; left out, with the reason said, where this machine
/// has none.
fn on_image(image: std::io::Result<Image>, quirks: Quirks) {
    match image {
        Ok(image) => agree_as(quirks, image.path(), "transport=classic,leases=no", 2, 50),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn two_mounts_of_an_xfs_agree_with_the_model() {
    if binary().is_some() {
        on_image(Image::xfs(), Quirks::mounted().on_xfs());
    }
}

#[test]
fn two_mounts_of_a_btrfs_agree_with_the_model() {
    if binary().is_some() {
        on_image(Image::btrfs(), Quirks::mounted().on_btrfs());
    }
}
