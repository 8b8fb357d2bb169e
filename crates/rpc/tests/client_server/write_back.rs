//! Writes that are kept in a log on the local disk: who sees them, and what becomes of them. The process, the machine or
//! the disk of the client may end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::leased_site::{KEEPS, LeasedSite, TERM, YES};
use crate::common::{client_options, simulate};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Entry, FileId, FileSystem, Fut, LockOwner, Make, Name,
    OpenFile, OpenHow, Pid, RequestId, SessionControl, Write,
};
use dray_rpc::client::{
    ClientOptions, ClientSession, KeptWritesStatus, LeftBehind, LocalLogDisk, RemoteFs,
    SessionMemory, WriteBackOptions, dirty_log_summaries,
};
use dray_rt::sync::oneshot;
use dray_rt::{ExecutorHandle, Scope, sleep};

/// A client with a log below a directory, which has its data aside there, too.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new() -> Disk {
        Disk(tempfile::tempdir().unwrap())
    }

    fn dir(&self) -> PathBuf {
        self.0.path().join("dirty")
    }

    fn options(&self) -> ClientOptions {
        let age_max = Duration::from_secs(30);
        let (dir, disk) = (self.dir(), Arc::new(LocalLogDisk));
        let log = WriteBackOptions { dir, disk, bytes_max: 8 << 20, age_max, supervisor: None };
        let aside = Some(self.0.path().join("aside"));
        ClientOptions { leases: KEEPS, aside, write_back: Some(log), ..client_options() }
    }

    /// As another machine would find it: nothing that this process holds is held there.
    fn copy(&self) -> Disk {
        let copy = Disk::new();
        for log in std::fs::read_dir(self.dir()).unwrap().map(Result::unwrap) {
            let to = copy.dir().join(log.file_name());
            std::fs::create_dir_all(&to).unwrap();
            for file in std::fs::read_dir(log.path()).unwrap().map(Result::unwrap) {
                std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        }
        copy
    }

    /// Bytes in all logs.
    fn dirty(&self) -> u64 {
        dirty_log_summaries(&self.dir()).unwrap().iter().map(|log| log.bytes).sum()
    }

    fn aside(&self) -> Vec<Vec<u8>> {
        let Ok(files) = std::fs::read_dir(self.0.path().join("aside")) else { return Vec::new() };
        let files = files.map(|file| file.unwrap().path());
        let data = files.filter(|path| path.extension().is_some_and(|ending| ending == "data"));
        data.map(|path| std::fs::read(path).unwrap()).collect()
    }
}

async fn client(site: &LeasedSite, host: &str, disk: &Disk) -> RemoteFs {
    let connector = site.network.connector_from(host, "s");
    let options = disk.options();
    let session = ClientSession::connect(connector, options, SessionMemory::heap()).await.unwrap();
    RemoteFs::new(session)
}

/// A process of the client `one`, in a scope of its own. With `follows`, one was before it.
async fn process(
    site: &LeasedSite,
    disk: &Disk,
    (memory, follows): (SessionMemory, bool),
) -> (Scope, RemoteFs) {
    let (scope, (give, given)) = (Scope::new(), oneshot::channel());
    let (connector, options) = (site.network.connector_from("one", "s"), disk.options());
    scope.spawn_on(&ExecutorHandle::current(), async move {
        let session = match follows {
            false => ClientSession::connect(connector, options, memory).await,
            true => {
                let taken = ClientSession::take_over(connector, options, memory, TERM, false);
                taken.await.expect("the session is known")
            }
        };
        let _ = give.send(RemoteFs::new(session.expect("a session"))); // the test waits for it
    });
    (scope, given.await.expect("it connects"))
}

async fn create(fs: &RemoteFs, root: FileId, name: &str) -> (Entry, Arc<dyn OpenFile>) {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
    let name = Name::new(name.as_bytes()).unwrap();
    fs.create(&Context::system(), root, name, how).await.unwrap()
}

async fn open(fs: &RemoteFs, id: FileId) -> Arc<dyn OpenFile> {
    let how = OpenHow { with_attr: true, ..OpenHow::READ_WRITE };
    fs.open(&Context::system(), id, how).await.unwrap()
}

async fn write(file: &Arc<dyn OpenFile>, at: u64, data: &[u8]) {
    let written = file.write(&Context::system(), Write::at(at), Buf::from(data)).await;
    assert_eq!(written.unwrap(), data.len());
}

async fn read(file: &Arc<dyn OpenFile>, len_bytes: usize) -> Vec<u8> {
    let read = file.read(&Context::system(), 0, BufMut::heap(len_bytes)).await;
    read.map_err(|(error, _)| error).unwrap().filled().to_vec()
}

async fn close(file: Arc<dyn OpenFile>) {
    let cx = Context::system();
    file.flush(&cx, LockOwner::own(1)).await.unwrap();
    file.close(&cx).await.unwrap();
}

fn kept(fs: &RemoteFs) -> KeptWritesStatus {
    fs.session().status().kept_writes.unwrap()
}

fn calls(site: &LeasedSite) -> u64 {
    site.server.status().clients.iter().map(|client| client.calls).sum()
}

async fn size_below(site: &LeasedSite, id: FileId) -> u64 {
    site.below.getattr(&Context::system(), id).await.unwrap().size
}

async fn until(what: impl Fn() -> bool) {
    let begun = dray_rt::now();
    while !what() {
        assert!(begun.elapsed() < 20 * TERM, "it does not happen");
        sleep(Duration::from_millis(10)).await;
    }
}

// proves: P311, P314
#[test]
fn writes_syncs_and_closes_are_answered_by_the_local_disk() {
    simulate(1, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let one = client(&site, "one", &disk).await;
        let (entry, file) = create(&one, site.root, "file").await;
        let before = calls(&site);
        write(&file, 0, &vec![1; 300 << 10]).await;
        write(&file, 300 << 10, b"end").await;
        file.sync(&cx, false).await.unwrap();
        assert_eq!((disk.dirty(), size_below(&site, entry.id).await), ((300 << 10) + 3, 0));
        close(file).await;
        assert_eq!((calls(&site) - before, size_below(&site, entry.id).await), (0, 0));
        let leases = &site.server.status().leases[0].1;
        assert_eq!(leases.written, 1, "the server knows whose data are out");
        sleep(Duration::from_secs(29)).await;
        assert_eq!(size_below(&site, entry.id).await, 0);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(size_below(&site, entry.id).await, (300 << 10) + 3, "the age has a bound");
        let status = kept(&one);
        assert_eq!((status.bytes, status.files, status.lost, disk.dirty()), (0, 0, 0, 0));
        assert_eq!(site.server.status().leases[0].1.written, 0, "the lease went back with them");
        let files = site.server.status().clients.iter().map(|one| one.files).sum::<usize>();
        assert_eq!(files, 0, "and the file is closed");
    });
}

/// Lookups of other names, and new files, send nothing of a file.
// proves: P314
#[test]
fn many_small_files_are_kept_until_somebody_looks_at_them() {
    simulate(34, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let one = client(&site, "one", &disk).await;
        let before = calls(&site);
        for number in 0..100 {
            let name = format!("file{number}");
            let looked = one.lookup(&cx, site.root, Name::new(name.as_bytes()).unwrap()).await;
            assert!(looked.is_err());
            let (_, file) = create(&one, site.root, &name).await;
            write(&file, 0, &[1; 100]).await;
            file.sync(&cx, false).await.unwrap();
            close(file).await;
        }
        assert!(calls(&site) - before <= 200, "{} calls", calls(&site) - before);
        assert_eq!((kept(&one).bytes, kept(&one).files), (10_000, 100));
        let name = Name::new(b"file7").unwrap();
        assert_eq!(one.lookup(&cx, site.root, name).await.unwrap().attr.size, 100);
        assert_eq!(kept(&one).bytes, 9_900, "only the file that was asked for is sent");
        one.finish().await;
        assert_eq!((kept(&one).bytes, kept(&one).files, kept(&one).lost), (0, 0, 0));
        let connector = site.network.connector_from("two", "s");
        let two = crate::common::connect(connector, client_options()).await.unwrap();
        for number in 0..100 {
            let name = format!("file{number}");
            let found = two.lookup(&cx, site.root, Name::new(name.as_bytes()).unwrap()).await;
            assert_eq!(found.unwrap().attr.size, 100);
        }
    });
}

/// `open("new", O_CREAT | O_TRUNC)`, as most programs make files.
async fn create_or_cut(fs: &RemoteFs, dir: FileId, name: &str) -> (Entry, Arc<dyn OpenFile>) {
    let open = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
    let how = CreateHow { open, mode: 0o644, exclusive: false };
    fs.create(&Context::system(), dir, Name::new(name.as_bytes()).unwrap(), how).await.unwrap()
}

async fn make_dir(fs: &RemoteFs, root: FileId, name: &str) -> FileId {
    let (name, what) = (Name::new(name.as_bytes()).unwrap(), Make::Directory { mode: 0o755 });
    fs.make(&Context::system(), root, name, what).await.unwrap().id
}

/// Each creation had sent what was kept of the file before: it did not know whether that is the one to be cut.
// proves: P346
#[test]
fn a_small_file_of_a_name_that_is_known_to_be_absent_costs_its_creation() {
    simulate(35, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let one = client(&site, "one", &disk).await;
        let dir = make_dir(&one, site.root, "dir").await;
        let before = calls(&site);
        for number in 0..100 {
            let name = format!("file{number}");
            let looked = one.lookup(&cx, dir, Name::new(name.as_bytes()).unwrap()).await;
            assert!(looked.is_err());
            let (_, file) = create_or_cut(&one, dir, &name).await;
            write(&file, 0, &[1; 100]).await;
            file.sync(&cx, false).await.unwrap();
            close(file).await;
        }
        assert!(calls(&site) - before <= 105, "{} calls", calls(&site) - before);
        assert_eq!((kept(&one).bytes, kept(&one).files), (10_000, 100));
        let (_, file) = create_or_cut(&one, dir, "file7").await;
        assert_eq!(file.getattr(&cx).await.unwrap().size, 0, "what was kept is cut, too");
        assert_eq!(kept(&one).bytes, 0, "all is sent where the file may be there");
        close(file).await;
        one.finish().await;
        assert_eq!((kept(&one).bytes, kept(&one).lost), (0, 0));
    });
}

/// Both believe that nothing has the name, or ask at the same time.
// proves: P346
#[test]
fn two_clients_that_make_one_file_at_once_have_the_same_file() {
    for seed in 0..8 {
        simulate(seed, async {
            let (site, cx) = (LeasedSite::new(), Context::system());
            let disks = [Disk::new(), Disk::new()];
            let one = client(&site, "one", &disks[0]).await;
            let other = client(&site, "other", &disks[1]).await;
            let dir = make_dir(&one, site.root, "dir").await;
            for number in 0..32 {
                let name = format!("file{number}");
                for client in [&one, &other] {
                    let name = Name::new(name.as_bytes()).unwrap();
                    assert!(client.lookup(&cx, dir, name).await.is_err());
                }
                let making = [&one, &other]
                    .map(|client| -> Fut<'_, _> { Box::pin(create_or_cut(client, dir, &name)) });
                let made = dray_rt::join_all(making.into_iter().collect()).await;
                assert_eq!(made[0].0.id, made[1].0.id);
                write(&made[0].1, 0, b"one").await;
                assert_eq!(read(&made[1].1, 10).await, b"one");
                for (_, file) in made {
                    close(file).await;
                }
            }
            for client in [&one, &other] {
                client.finish().await;
                assert_eq!((kept(client).bytes, kept(client).lost), (0, 0));
            }
        });
    }
}

/// A sync asks the server where it may have what is not on media.
// proves: P314
#[test]
fn a_sync_of_what_the_server_has_asks_the_server() {
    simulate(2, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let one = client(&site, "one", &disk).await;
        let (entry, file) = create(&one, site.root, "file").await;
        close(file).await;
        let file = open(&one, entry.id).await;
        let syncs = async |expected: u64| {
            let before = calls(&site);
            file.sync(&cx, false).await.unwrap();
            assert_eq!(calls(&site) - before, expected);
        };
        write(&file, 0, b"one").await;
        syncs(2).await; // the data, and the sync: others may have changed the file before
        write(&file, 3, b"two").await;
        syncs(0).await;
        let cut = dray_core::SetAttr { size: Some(4), ..dray_core::SetAttr::default() };
        file.setattr(&cx, cut).await.unwrap();
        write(&file, 4, b"three").await;
        syncs(1).await;
        assert_eq!(size_below(&site, entry.id).await, 9);
    });
}

// proves: P315
#[test]
fn others_see_everything_that_is_kept() {
    simulate(3, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let (one, other) = (client(&site, "one", &disk).await, site.client("other", YES).await);
        let before = dray_rt::now();
        for way in 0..4 {
            let name = format!("file{way}");
            let (entry, file) = create(&one, site.root, &name).await;
            for piece in 0..5u64 {
                write(&file, piece << 20, &vec![piece as u8; 1 << 20]).await;
            }
            write(&file, 0, b"data").await;
            if way % 2 == 0 {
                close(file).await;
            }
            let name = Name::new(name.as_bytes()).unwrap();
            let size = match way {
                0 => other.lookup(&cx, site.root, name).await.unwrap().attr.size,
                1 => other.getattr(&cx, entry.id).await.unwrap().size,
                2 => one.getattr(&cx, entry.id).await.unwrap().size,
                _ => one.lookup(&cx, site.root, name).await.unwrap().attr.size,
            };
            assert_eq!(size, 5 << 20, "way {way}");
            assert_eq!(read(&open(&other, entry.id).await, 5).await, b"data\0", "way {way}");
            assert_eq!((kept(&one).late, kept(&one).lost, disk.dirty()), (0, 0, 0), "way {way}");
        }
        assert!(before.elapsed() < TERM, "nobody waited for the end of a lease");
    });
}

/// The process dies with what it has kept, or while it sends that.
// proves: P311
#[test]
fn a_successor_sends_what_is_in_the_log() {
    for dies in 0..3 {
        simulate(4 + dies, async move {
            let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
            let other = site.client("other", YES).await;
            let memory = SessionMemory::create_memfd().unwrap();
            let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
            let (scope, one) = process(&site, &disk, (memory, false)).await;
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
            let by = |fs: &RemoteFs, request| {
                let who = Context::system().who;
                Context::new(fs.session().node(), RequestId(request), who, Pid(1))
            };
            let name = Name::new(b"file").unwrap();
            let (entry, file) = one.create(&by(&one, 1), site.root, name, how).await.unwrap();
            for (request, at, data) in [(2, 0, "data "), (3, 5, "more")] {
                let (cx, data) = (by(&one, request), Buf::from(data.as_bytes()));
                file.write(&cx, Write::at(at), data).await.unwrap();
            }
            match dies {
                0 => {}
                1 => {
                    let handle = file.clone();
                    scope.spawn_on(&ExecutorHandle::current(), async move {
                        let _ = handle.getattr(&Context::system()).await; // the process dies in it
                    });
                    dray_rt::yield_now().await;
                }
                // Its programs have closed it: no front end knows of it any more.
                _ => close(file.clone()).await,
            }
            scope.kill();
            site.network.break_all("one");
            let disk = disk.copy();
            let memory = SessionMemory::from_fd(fd).unwrap();
            let (_scope, one) = process(&site, &disk, (memory, true)).await;
            one.attached();
            one.hear_recalls_by(Arc::new(|_, done| drop(done)));
            let theirs = open(&other, entry.id).await;
            assert_eq!(read(&theirs, 20).await, b"data more", "way {dies}");
            theirs.write(&cx, Write::at(0), Buf::from(&b"DATA"[..])).await.unwrap();
            if dies < 2 {
                // The kernel had no answer to this one. It was made before others changed that.
                let file = one.attach(entry.id, OpenHow::READ_WRITE, RequestId(1)).unwrap();
                let (cx, data) = (by(&one, 2), Buf::from(&b"data "[..]));
                file.write(&cx, Write::at(0), data).await.unwrap();
                close(file).await;
            }
            assert_eq!(read(&theirs, 20).await, b"DATA more", "way {dies}");
            let status = kept(&one);
            assert_eq!((status.late, status.lost, status.bytes), (0, 0, 0), "way {dies}");
            assert_eq!(disk.dirty(), 0, "way {dies}");
        });
    }
}

/// The machine of the client dies. The next mount writes what is in the log, if nobody has changed the file.
// proves: P313
#[test]
fn the_next_mount_writes_what_a_machine_has_left() {
    for change in 0..4 {
        simulate(10 + change, async move {
            let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
            let other = site.client("other", YES).await;
            let (scope, one) = process(&site, &disk, (SessionMemory::heap(), false)).await;
            let (entry, file) = create(&one, site.root, "file").await;
            write(&file, 0, b"first").await;
            file.sync(&cx, false).await.unwrap();
            one.getattr(&cx, entry.id).await.unwrap(); // it is sent
            write(&file, 5, b" second").await;
            file.sync(&cx, false).await.unwrap();
            if change == 3 {
                // It was sent, and the note of that did not reach the disk.
                let log = dirty_log_summaries(&disk.dir()).unwrap().remove(0).dir;
                let path = log.join(format!("{:016x}.log", 0));
                let before = std::fs::read(&path).unwrap();
                one.getattr(&cx, entry.id).await.unwrap();
                assert_eq!(size_below(&site, entry.id).await, 12);
                std::fs::write(&path, before).unwrap();
            }
            scope.kill();
            site.network.break_all("one");
            let disk = disk.copy();
            match change {
                1 => write(&open(&other, entry.id).await, 0, b"FIRST").await,
                2 => {
                    let name = Name::new(b"file").unwrap();
                    other.remove(&cx, site.root, name, dray_core::RemoveKind::File).await.unwrap();
                }
                _ => {}
            }
            let elsewhere = ClientOptions { export: "data".into(), ..disk.options() };
            let connector = site.network.connector_from("one", "s");
            let memory = SessionMemory::heap();
            let next = ClientSession::connect(connector, elsewhere, memory).await.unwrap();
            assert_eq!(disk.dirty(), 7, "way {change}");
            let done = next.write_left_behind().await;
            let (size, aside) = (12, b"\0\0\0\0\0 second".to_vec());
            match change {
                0 | 3 => {
                    assert_eq!(done, LeftBehind { files: 1, bytes: 7, ..LeftBehind::default() });
                    assert_eq!(size_below(&site, entry.id).await, size);
                    let theirs = open(&other, entry.id).await;
                    assert_eq!(read(&theirs, 20).await, b"first second");
                }
                _ => {
                    assert_eq!(done, LeftBehind { aside: 1, ..LeftBehind::default() });
                    assert_eq!(disk.aside(), [aside]);
                }
            }
            assert_eq!(dirty_log_summaries(&disk.dir()).unwrap(), [], "nothing is left");
            assert_eq!(next.write_left_behind().await, LeftBehind::default());
        });
    }
}

/// A log is about one export, and is left alone by mounts of others.
// proves: P313
#[test]
fn a_log_is_not_written_to_another_export() {
    simulate(20, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let (scope, one) = process(&site, &disk, (SessionMemory::heap(), false)).await;
        let (_, file) = create(&one, site.root, "file").await;
        write(&file, 0, b"data").await;
        file.sync(&cx, false).await.unwrap();
        scope.kill();
        let disk = disk.copy();
        let elsewhere = LeasedSite::new();
        create(&elsewhere.client("two", KEEPS).await, elsewhere.root, "file").await;
        let other = client(&elsewhere, "one", &disk).await;
        assert_eq!(other.session().write_left_behind().await, LeftBehind::default());
        assert_eq!(disk.dirty(), 4);
    });
}

/// The disk of the client is full, or gone.
// proves: P316
#[test]
fn errors_of_the_disk_reach_no_program() {
    simulate(30, async {
        let (site, cx, disk) = (LeasedSite::new(), Context::system(), Disk::new());
        let one = client(&site, "one", &disk).await;
        std::fs::write(disk.dir(), "no directory").unwrap();
        let (entry, file) = create(&one, site.root, "file").await;
        write(&file, 0, b"data").await;
        assert_eq!((kept(&one).bytes, size_below(&site, entry.id).await), (0, 4));
        assert_eq!(kept(&one).disk_errors, Some(1));
        file.sync(&cx, false).await.unwrap();
        std::fs::remove_file(disk.dir()).unwrap();
        sleep(Duration::from_secs(11)).await;
        close(file).await;
        let file = open(&one, entry.id).await;
        write(&file, 4, b"more").await;
        assert_eq!((kept(&one).bytes, size_below(&site, entry.id).await), (4, 4));
    });
}

// proves: P317
#[test]
fn the_end_of_a_mount_leaves_nothing() {
    simulate(31, async {
        let (site, disk) = (LeasedSite::new(), Disk::new());
        let one = client(&site, "one", &disk).await;
        let (entry, file) = create(&one, site.root, "file").await;
        write(&file, 0, b"data").await;
        close(file).await;
        assert_eq!((disk.dirty(), size_below(&site, entry.id).await), (4, 0));
        one.finish().await;
        assert_eq!(size_below(&site, entry.id).await, 4);
        assert_eq!(std::fs::read_dir(disk.dir()).unwrap().count(), 0);
    });
}

/// A server that is away takes nothing at the end of a mount: it is there for the next one.
// proves: P317
#[test]
fn what_the_server_does_not_take_is_left_for_the_next_mount() {
    simulate(32, async {
        let (site, disk) = (LeasedSite::new(), Disk::new());
        let (scope, one) = process(&site, &disk, (SessionMemory::heap(), false)).await;
        let (entry, file) = create(&one, site.root, "file").await;
        write(&file, 0, b"data").await;
        close(file).await;
        site.network.partition("s", true);
        one.finish().await;
        assert_eq!(disk.dirty(), 4, "{:?} {:?}", kept(&one), disk.aside());
        scope.kill();
        let disk = disk.copy();
        site.network.partition("s", false);
        let next = client(&site, "one", &disk).await;
        assert_eq!(next.session().write_left_behind().await.bytes, 4);
        assert_eq!(size_below(&site, entry.id).await, 4);
    });
}

/// What is in the log has a bound, and what is beyond goes to the server at once.
// proves: P312
#[test]
fn dirty_data_have_a_bound() {
    simulate(33, async {
        let (site, disk) = (LeasedSite::new(), Disk::new());
        let one = client(&site, "one", &disk).await;
        let (entry, file) = create(&one, site.root, "file").await;
        for piece in 0..30u64 {
            write(&file, piece << 20, &vec![piece as u8; 1 << 20]).await;
            assert!(kept(&one).bytes <= 8 << 20 && disk.dirty() <= 8 << 20);
        }
        close(file).await;
        until(|| kept(&one).bytes == 0).await;
        assert_eq!(size_below(&site, entry.id).await, 30 << 20);
    });
}

#[test]
fn a_directory_that_is_not_there_has_no_logs() {
    assert_eq!(dirty_log_summaries(Path::new("/nowhere")).unwrap(), []);
}
