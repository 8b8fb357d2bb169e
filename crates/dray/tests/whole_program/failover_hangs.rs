//! A file system in user space that hangs below one of three servers with failover. Needs root.
//!
//! Each server has the file system through a mount of its own, as with MooseFS. The mounts are dray's: what
//! serves one of them stands still when its own server below is stopped, and has the requests then.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use crate::common::hangs::in_time;
use crate::common::load::Load;
use crate::common::{Rig, skipped, wait_for};
use crate::failover::Cluster;
use dray_core::FileId;
use dray_layers::placement::{Placement, ServerIndex, Slices, parse_definitions};

/// One tree, and a mount of it for each of three servers.
struct Below {
    rigs: Vec<Rig>,
    mounts: Vec<PathBuf>,
}

impl Below {
    fn new() -> Below {
        let mut rigs: Vec<Rig> = (0..3).map(|_| Rig::new()).collect();
        let tree = rigs[0].path("export");
        fs::set_permissions(&tree, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        // Like NFS it has no attributes for the servers' key: servers learn ids from names then.
        let config = format!(
            "faults = true\n[[export]]\nname = 'tree'\ndir = '{}'\nsquash = 'none'\n\
             [[fault]]\nexport = 'tree'\nop = 'getxattr'\nerror = 'ENOTSUP'\n",
            tree.display()
        );
        let mount = |rig: &mut Rig| {
            let file = rig.path("config.toml");
            fs::write(&file, &config).unwrap();
            rig.serve(&["--config", file.to_str().unwrap()]);
            rig.mount_export("tree", "mount", "")
        };
        let mounts = rigs.iter_mut().map(mount).collect();
        Below { rigs, mounts }
    }

    /// What is in the file system, without any mount.
    fn path(&self, name: &str) -> PathBuf {
        self.rigs[0].path("export").join(name)
    }
}

/// A file whose content is at the first server, by its path from `at` on. Its successor is the server of its name, which
/// has met its id. Another one may not know an open file (PROJECTIONS, ids that are learned).
fn file_at_first(cluster: &Cluster, at: &Path) -> (String, File) {
    let text = fs::read_to_string(cluster.servers[0].path("projections.toml")).unwrap();
    let slices = Slices::of(Placement::new(&parse_definitions(&text).unwrap()[0]));
    let placement = Placement::new(&parse_definitions(&text).unwrap()[0]);
    let id_of = |found: fs::Metadata| FileId { ino: found.ino(), generation: 0 };
    let names_at = |dir: &String| {
        fs::create_dir(at.join(dir)).unwrap();
        placement.directory(id_of(fs::metadata(at.join(dir)).unwrap()))
    };
    let (dir, names) = (0..200)
        .map(|number| format!("dir{number}"))
        .map(|dir| (names_at(&dir), dir))
        .find_map(|(names, dir)| (names != ServerIndex(0)).then_some((dir, names)))
        .expect("one of so many directories is elsewhere");
    (0..200)
        .find_map(|number| {
            let path = format!("{dir}/file{number}");
            let file = File::options().create_new(true).read(true).write(true).open(at.join(&path));
            let file = file.unwrap();
            let slice = slices.home(id_of(file.metadata().unwrap()));
            let servers = (slices.home_of(slice), slices.successor_of(slice));
            (servers == (ServerIndex(0), Some(names))).then_some((path, file))
        })
        .expect("one of so many files is there")
}

/// Files of all servers.
const SEEN: usize = 24;

/// Looks at files of all servers. An idle mount does not notice that a server has stopped, and the successor waits for
/// what such a mount may have to send again.
fn look(at: PathBuf) -> impl FnMut(u64) -> std::io::Result<()> {
    move |_| {
        (0..SEEN).try_for_each(|number| fs::metadata(at.join(format!("seen{number}"))).map(drop))
    }
}

/// Writes on a thread, which may have to wait.
fn write(file: &File, text: &'static str) -> JoinHandle<std::io::Result<()>> {
    let file = file.try_clone().unwrap();
    std::thread::spawn(move || file.write_all_at(text.as_bytes(), 0))
}

/// What hangs belongs to a server that is a member: its share waits with it. When the server is cut off another one
/// has the share, and nobody waits for what hangs. Then one thing is left, as ADR 0042 says: what hangs is carried out
/// when the file system goes on, over what was written since. It is carried out once, and nothing else is.
// proves: P365
#[test]
fn what_hangs_below_a_server_that_was_succeeded_is_carried_out_late_and_nothing_else_is() {
    if skipped() {
        return;
    }
    let below = Below::new();
    let Some(cluster) = Cluster::over("layout = 'cluster'", &below.mounts) else { return };
    let mut cluster = cluster;
    let at = cluster.mount_with(1, "at", "");
    let other = cluster.mount_with(2, "other", "");
    let (name, file) = file_at_first(&cluster, &at);
    file.write_all_at(b"first.+tail", 0).unwrap();
    let content = |at: &Path| fs::read_to_string(at.join(&name)).unwrap();

    let mut load = Load::new();
    for number in 0..SEEN {
        File::create(at.join(format!("seen{number}"))).unwrap();
    }
    [&at, &other].into_iter().for_each(|at| load.add(look(at.clone())));

    below.rigs[0].stop_server();
    let hangs = write(&file, "hung..");
    wait_for("the hang to be shown", || {
        let text = cluster.servers[0].demand(&["status", "--json"]);
        text.lines().any(|line| line.contains("\"hang\":{"))
    });
    // The server is there, so it is not succeeded. Calls for the others go on.
    assert_eq!(cluster.served(1).len(), 2, "it has what it is the home of");
    assert!(!hangs.is_finished());

    cluster.servers[0].stop_server();
    wait_for("the survivors to serve", || [1, 2].iter().all(|one| cluster.served(*one).len() == 3));
    in_time("the write that hung", move || hangs.join().unwrap().unwrap());
    assert_eq!(content(&other), "hung..+tail");
    write(&file, "newer.").join().unwrap().unwrap();
    let size = fs::metadata(other.join(&name)).unwrap().len();
    assert_eq!(
        (content(&at).as_str(), content(&other).as_str(), size),
        ("newer.+tail", "newer.+tail", 11)
    );

    below.rigs[0].server().signal(libc::SIGCONT);
    wait_for("what hung to be carried out", || content(&other) == "hung..+tail");
    assert_eq!(fs::read_to_string(below.path(&name)).unwrap(), "hung..+tail");
    write(&file, "newest").join().unwrap().unwrap();

    // The server that was cut off answers nobody, and gets its share back. Nothing is made a second time.
    cluster.servers[0].server().signal(libc::SIGCONT);
    wait_for("the share to be back", || cluster.is_settled());
    for at in [&at, &other] {
        assert_eq!(content(at), "newest+tail");
    }
    assert_eq!(fs::read_to_string(below.path(&name)).unwrap(), "newest+tail");
    load.end();
}
