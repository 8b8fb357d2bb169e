//! Servers that learn ids from names, and clients that share what they have met, or have met nothing.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileId, FileSystem, FsUuid, Make, Name, Op, OpenHow, Result,
    Write,
};
use dray_layers::placement::{FilePlaces, placed_stack};
use dray_testkit::fixture::{MountGuard, TempDir, block_on, skipped_without_root};

use crate::site::{connected, failing, placement_over, server_of};

const SERVERS: usize = 3;
const LAYOUT: &str = "layout = \"cluster\"";
const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

fn name(name: &str) -> &Name {
    Name::new(name.as_bytes()).unwrap()
}

/// A file system whose files have no handles.
struct Ramfs {
    mount: MountGuard, // dropped before the directory that it is in
    _dir: TempDir,
}

impl Ramfs {
    fn new() -> Ramfs {
        let dir = TempDir::new("ramfs").unwrap();
        let path = dir.subdir("mnt").unwrap();
        let mount = Command::new("mount").args(["-t", "ramfs", "ramfs"]).arg(&path).status();
        assert!(mount.unwrap().success());
        Ramfs { mount: MountGuard::new(path), _dir: dir }
    }
}

/// As many servers as there would be processes: nothing in them is shared but the directory.
fn servers(root: &Path) -> Vec<Arc<dyn FileSystem>> {
    let options = PosixOptions {
        squash: Squash::None,
        id_key: Some(9),
        shared_ids: true,
        ..Default::default()
    };
    let server =
        |_| PosixFs::open(root, FsUuid(7), options.clone()).unwrap() as Arc<dyn FileSystem>;
    (0..SERVERS).map(server).collect()
}

/// Directories of a test: some of their files have another home than the server of the directory.
const DIRS: usize = 40;

/// Two clients, or two threads of one client that share what they have met. Where nothing `lists`, no name can
/// be found in listings.
fn with_two(
    (share, lists): (bool, bool),
    test: impl AsyncFnOnce(&Path, [Arc<dyn FileSystem>; 2], FileId),
) {
    if skipped_without_root() {
        return;
    }
    let ramfs = Ramfs::new();
    let root = ramfs.mount.path();
    block_on(async {
        let servers = servers(root).into_iter().map(|fs| match lists {
            true => fs,
            false => failing(fs, Op::Readdir, Errno::EIO),
        });
        let sessions = connected(servers.map(server_of).collect(), 2).await;
        let places: Arc<FilePlaces> = Arc::default();
        let clients: Vec<_> = sessions
            .into_iter()
            .map(|sessions| {
                let places = if share { places.clone() } else { Arc::default() };
                placed_stack(placement_over(SERVERS, LAYOUT), places, sessions, Vec::new()).fs
            })
            .collect();
        let [one, other] = clients.try_into().ok().unwrap();
        assert!(one.info().learns_ids());
        let id = one.info().root;
        test(root, [one, other], id).await;
    });
    dray_backends::posix::release().unwrap();
}

async fn make_dirs(fs: &dyn FileSystem, root: FileId) -> Vec<FileId> {
    let (cx, what) = (Context::system(), Make::Directory { mode: 0o755 });
    let mut dirs = Vec::new();
    for number in 0..DIRS {
        let dir = format!("d{number}");
        dirs.push(fs.make(&cx, root, name(&dir), what).await.unwrap().id);
    }
    dirs
}

/// Makes a file of one byte.
async fn make_file(fs: &dyn FileSystem, dir: FileId, called: &str) -> Result<FileId> {
    let cx = Context::system();
    let (entry, file) = fs.create(&cx, dir, name(called), NEW).await?;
    file.write(&cx, Write::at(0), Buf::from(&b"x"[..])).await?;
    file.close(&cx).await?;
    Ok(entry.id)
}

/// A kernel asks one thread of a mount for a directory and another one for what is in it. Each thread knew
/// what it had looked up itself, and what it could not show to a server did not exist.
// proves: P155
#[test]
fn a_thread_can_use_what_another_thread_has_looked_up() {
    with_two((true, false), async |_, [one, other], root| {
        let cx = Context::system();
        for dir in make_dirs(&*one, root).await {
            let made = make_file(&*other, dir, "f").await.unwrap();
            let found = other.lookup(&cx, dir, name("f")).await.unwrap();
            assert_eq!((found.id, found.attr.size), (made, 1));
            let link = other.link(&cx, made, dir, name("link")).await.unwrap();
            assert_eq!((link.id, link.attr.nlink), (made, 2));
        }
    });
}

/// Programs have working directories and open directories that the next client process has never looked up.
// proves: P157
#[test]
fn a_client_finds_the_names_of_directories_that_it_has_not_met() {
    with_two((false, true), async |below, [one, other], root| {
        let cx = Context::system();
        for (number, dir) in make_dirs(&*one, root).await.into_iter().enumerate() {
            let deep = one.make(&cx, dir, name("deep"), Make::Directory { mode: 0o700 });
            let deep = deep.await.unwrap().id;
            one.getattr(&cx, deep).await.unwrap(); // its own server has met it
            if number % 2 == 1 {
                // Nobody knows this name so far.
                std::fs::rename(below.join(format!("d{number}")), below.join(format!("m{number}")))
                    .unwrap();
            }
            let made = make_file(&*other, deep, "f").await.unwrap();
            let found = other.lookup(&cx, deep, name("f")).await.unwrap();
            assert_eq!((found.id, found.attr.size), (made, 1));
            assert_eq!(one.lookup(&cx, deep, name("f")).await.unwrap().id, made);
        }
    });
}

/// The file did not exist, or it was used at a server that is not its home, as if it had been removed.
// proves: P157
#[test]
fn what_cannot_be_shown_to_its_home_is_stale_and_neither_absent_nor_used_elsewhere() {
    with_two((false, false), async |_, [one, other], root| {
        let (cx, mut stale) = (Context::system(), [0, 0, 0]);
        for dir in make_dirs(&*one, root).await {
            let id = make_file(&*one, dir, "old").await.unwrap();
            let found = [
                other.lookup(&cx, dir, name("none")).await.map(drop),
                make_file(&*other, dir, "new").await.map(drop),
                other.link(&cx, id, dir, name("link")).await.map(drop),
            ];
            assert_eq!(found[0].as_ref().unwrap_err().errno(), Errno::ENOENT);
            for (outcome, stale) in found.into_iter().zip(&mut stale).skip(1) {
                match outcome {
                    Ok(()) => {}
                    Err(error) if error.errno() == Errno::ESTALE => *stale += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            // The first client has shown its own files, and not the new one.
            if let Err(error) = other.lookup(&cx, dir, name("new")).await {
                assert_eq!(error.errno(), Errno::ESTALE);
                stale[0] += 1;
            }
        }
        assert!(stale[0] > 0 && stale[1] > 0, "{stale:?}");
    });
}
