//! Files whose writes a client may keep: who sees them, and what becomes of them if it is cut off.

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::leased_site::{KEEPS, LeasedSite, TERM, YES};
use crate::common::{client_options, simulate};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Entry, Errno, FileId, FileSystem, Gid, Identity, Name,
    OpenFile, OpenHow, Pid, RequestId, SessionControl, Uid, Write,
};
use dray_rpc::client::{ClientOptions, ClientSession, KeptWritesStatus, RemoteFs, SessionMemory};
use dray_rt::sync::oneshot;
use dray_rt::{ExecutorHandle, Scope, sleep};

async fn create(fs: &RemoteFs, root: FileId) -> (Entry, Arc<dyn OpenFile>) {
    create_named(fs, root, "file").await
}

async fn create_named(fs: &RemoteFs, root: FileId, name: &str) -> (Entry, Arc<dyn OpenFile>) {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
    let name = Name::new(name.as_bytes()).unwrap();
    fs.create(&Context::system(), root, name, how).await.unwrap()
}

async fn size_by_name(fs: &RemoteFs, root: FileId, name: &str) -> u64 {
    let name = Name::new(name.as_bytes()).unwrap();
    fs.lookup(&Context::system(), root, name).await.unwrap().attr.size
}

/// As a listing says it, if it does.
async fn size_in_listing(fs: &RemoteFs, root: FileId, name: &str) -> u64 {
    let cx = Context::system();
    let dir = fs.open(&cx, root, OpenHow::DIRECTORY).await.unwrap();
    let page = dir.readdir(&cx, 0, 10_000, true).await.unwrap();
    let (_, entry) = page.iter().find(|(found, _)| *found == name.as_bytes()).unwrap();
    match entry.attr {
        Some(attr) => attr.size,
        None => size_by_name(fs, root, name).await,
    }
}

async fn open(fs: &RemoteFs, id: FileId) -> Arc<dyn OpenFile> {
    let how = OpenHow { with_attr: true, ..OpenHow::READ_WRITE };
    fs.open(&Context::system(), id, how).await.unwrap()
}

async fn write(file: &Arc<dyn OpenFile>, at: u64, data: &[u8]) {
    let written = file.write(&Context::system(), Write::at(at), Buf::from(data)).await;
    assert_eq!(written.unwrap(), data.len());
}

async fn read(file: &Arc<dyn OpenFile>) -> Vec<u8> {
    let read = file.read(&Context::system(), 0, BufMut::heap(100)).await;
    read.map_err(|(error, _)| error).unwrap().filled().to_vec()
}

fn kept(fs: &RemoteFs) -> KeptWritesStatus {
    fs.session().status().kept_writes.unwrap()
}

/// Calls that the server has got.
fn calls(site: &LeasedSite) -> u64 {
    site.server.status().clients.iter().map(|client| client.calls).sum()
}

async fn size_below(site: &LeasedSite, id: FileId) -> u64 {
    site.below.getattr(&Context::system(), id).await.unwrap().size
}

// proves: P256
#[test]
fn small_writes_of_a_new_file_travel_with_its_close() {
    simulate(1, async {
        let (site, cx) = (LeasedSite::new(), Context::system());
        let one = site.client("one", KEEPS).await;
        let before = calls(&site);
        let (entry, file) = create(&one, site.root).await;
        for number in 0..10 {
            write(&file, number * 4, b"data").await;
        }
        assert_eq!((size_below(&site, entry.id).await, kept(&one).bytes), (0, 40));
        file.flush(&cx, dray_core::LockOwner::own(1)).await.unwrap();
        assert_eq!((size_below(&site, entry.id).await, kept(&one).bytes), (40, 0));
        // Its creation, and all of its data. It is known here that there are no locks.
        assert_eq!(calls(&site) - before, 2);
        file.close(&cx).await.unwrap();
        let status = kept(&one);
        assert_eq!((status.writes, status.files, status.late, status.lost), (10, 0, 0, 0));
        assert_eq!(site.server.status().leases[0].1.written, 0, "the lease went back with them");
    });
}

/// A strict mount does not ask for attributes when it opens a file. Without them there is no lease.
// proves: P256
#[test]
fn small_writes_of_an_old_file_travel_with_its_close() {
    simulate(1, async {
        let (site, cx) = (LeasedSite::new(), Context::system());
        let one = site.client("one", KEEPS).await;
        let (entry, file) = create(&one, site.root).await;
        file.flush(&cx, dray_core::LockOwner::own(1)).await.unwrap();
        file.close(&cx).await.unwrap();
        one.statfs(&cx).await.unwrap(); // the close travels with it
        let before = calls(&site);
        let file = one.open(&cx, entry.id, OpenHow::new(libc::O_WRONLY)).await.unwrap();
        for number in 0..10 {
            write(&file, number * 4, b"data").await;
        }
        assert_eq!((size_below(&site, entry.id).await, kept(&one).bytes), (0, 40));
        file.flush(&cx, dray_core::LockOwner::own(1)).await.unwrap();
        assert_eq!((size_below(&site, entry.id).await, kept(&one).bytes), (40, 0));
        assert_eq!(calls(&site) - before, 2, "its opening, and all of its data");
        file.close(&cx).await.unwrap();
    });
}

// proves: P257
#[test]
fn all_clients_see_what_was_written_to_a_file() {
    simulate(2, async {
        let (site, cx) = (LeasedSite::new(), Context::system());
        let (one, other) = (site.client("one", KEEPS).await, site.client("other", YES).await);
        let before = dray_rt::now();
        for way in 0..9 {
            let name = format!("file{way}");
            let (entry, file) = create_named(&one, site.root, &name).await;
            write(&file, 0, b"data").await;
            assert_eq!((kept(&one).bytes, size_below(&site, entry.id).await), (4, 0), "way {way}");
            let seen = match way {
                0 => size_by_name(&other, site.root, &name).await,
                1 => size_in_listing(&other, site.root, &name).await,
                2 => other.getattr(&cx, entry.id).await.unwrap().size,
                3 => read(&open(&other, entry.id).await).await.len() as u64,
                4 => open(&other, entry.id).await.at_open().unwrap().attr.size,
                5 => size_by_name(&one, site.root, &name).await,
                6 => size_in_listing(&one, site.root, &name).await,
                7 => one.getattr(&cx, entry.id).await.unwrap().size,
                _ => read(&file).await.len() as u64,
            };
            assert_eq!(seen, 4, "way {way}");
            file.close(&cx).await.unwrap();
            let status = kept(&one);
            assert_eq!((status.bytes, status.late, status.lost), (0, 0, 0), "way {way}");
        }
        assert!(before.elapsed() < TERM, "nobody waited for the end of a lease");
    });
}

// proves: P258
#[test]
fn what_is_kept_is_sent_within_a_second() {
    simulate(3, async {
        let site = LeasedSite::new();
        let one = site.client("one", KEEPS).await;
        let (entry, file) = create(&one, site.root).await;
        write(&file, 0, b"data").await;
        assert_eq!(size_below(&site, entry.id).await, 0);
        sleep(std::time::Duration::from_millis(1100)).await;
        assert_eq!((size_below(&site, entry.id).await, kept(&one).bytes), (4, 0));
    });
}

// proves: P259
#[test]
fn a_client_that_was_cut_off_writes_over_nothing_newer() {
    for changes in [true, false] {
        simulate(4, async move {
            let (site, cx) = (LeasedSite::new(), Context::system());
            let (one, other) = (site.client("one", KEEPS).await, site.client("other", KEEPS).await);
            let (entry, file) = create(&one, site.root).await;
            write(&file, 0, b"one").await;
            site.network.partition("one", true);
            let theirs = open(&other, entry.id).await;
            match changes {
                true => write(&theirs, 0, b"other").await,
                false => assert_eq!(read(&theirs).await, b"", "nobody waits for ever"),
            }
            theirs.close(&cx).await.unwrap();
            site.network.partition("one", false);
            let closed = file.close(&cx).await;
            let (text, status) = (read(&open(&other, entry.id).await).await, kept(&one));
            match changes {
                true => {
                    assert_eq!(closed.unwrap_err().errno(), Errno::EIO);
                    assert_eq!((&text[..], status.lost, status.bytes), (&b"other"[..], 1, 0));
                }
                false => {
                    closed.unwrap();
                    assert_eq!((&text[..], status.late, status.lost), (&b"one"[..], 1, 0));
                }
            }
        });
    }
}

/// A process of the client `one`, in a scope of its own. `memory`: of the process before, if there was one.
async fn process(
    site: &LeasedSite,
    memory: SessionMemory,
    (follows, aside): (bool, Option<PathBuf>),
) -> (Scope, RemoteFs) {
    let (scope, (give, given)) = (Scope::new(), oneshot::channel());
    let connector = site.network.connector_from("one", "s");
    let options = ClientOptions { leases: KEEPS, aside, ..client_options() };
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

fn of_request(fs: &RemoteFs, request: u64) -> Context {
    let who = Identity { uid: Uid(0), gid: Gid(0), groups: [Gid(7)].into(), job: "job".into() };
    Context::new(fs.session().node(), RequestId(request), Arc::new(who), Pid(1))
}

async fn write_by(fs: &RemoteFs, file: &Arc<dyn OpenFile>, (request, at): (u64, u64), data: &[u8]) {
    let written = file.write(&of_request(fs, request), Write::at(at), Buf::from(data)).await;
    assert_eq!(written.unwrap(), data.len());
}

/// The process dies with what it has kept, or while it sends that, or just after. A write of which the kernel has no
/// answer comes once more, and is made once.
// proves: P281
#[test]
fn what_a_process_had_kept_is_written_by_its_successor() {
    for dies in 0..3 {
        simulate(5 + dies, async move {
            let (site, cx) = (LeasedSite::new(), Context::system());
            let other = site.client("other", YES).await;
            let memory = SessionMemory::create_memfd().unwrap();
            let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
            let (scope, one) = process(&site, memory, (false, None)).await;
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
            let name = Name::new(b"file").unwrap();
            let (entry, file) =
                one.create(&of_request(&one, 1), site.root, name, how).await.unwrap();
            write_by(&one, &file, (2, 0), b"data ").await;
            write_by(&one, &file, (3, 5), b"more").await;
            assert_eq!((kept(&one).bytes, size_below(&site, entry.id).await), (9, 0));
            let handle = file.clone();
            match dies {
                0 => {}
                1 => scope.spawn_on(&ExecutorHandle::current(), async move {
                    let _ = handle.sync(&Context::system(), true).await; // the process dies in it
                }),
                _ => handle.sync(&cx, true).await.unwrap(),
            }
            if dies == 1 {
                dray_rt::yield_now().await;
            }
            scope.kill();
            site.network.break_all("one");
            let before = dray_rt::now();
            let memory = SessionMemory::from_fd(fd).unwrap();
            let (_scope, one) = process(&site, memory, (true, None)).await;
            let file = one.attach(entry.id, OpenHow::READ_WRITE, RequestId(1)).unwrap();
            one.attached();
            one.hear_recalls_by(Arc::new(|_, done| drop(done)));
            let theirs = open(&other, entry.id).await;
            assert_eq!(read(&theirs).await, b"data more", "way {dies}");
            theirs.write(&cx, Write::at(0), Buf::from(&b"DATA"[..])).await.unwrap();
            // The kernel had no answer to this one. It was made before others changed that.
            write_by(&one, &file, (2, 0), b"data ").await;
            assert_eq!(read(&theirs).await, b"DATA more", "way {dies}");
            write_by(&one, &file, (9, 4), b"+").await;
            file.close(&cx).await.unwrap();
            assert_eq!(read(&theirs).await, b"DATA+more", "way {dies}");
            let status = kept(&one);
            assert_eq!((status.late, status.lost, status.bytes), (0, 0, 0), "way {dies}");
            assert!(before.elapsed() < TERM, "way {dies}: somebody waited for the end of a lease");
        });
    }
}

/// A client that is away for longer than its lease, and whose process dies meanwhile.
// proves: P281, P282
#[test]
fn what_a_successor_may_not_write_is_kept_aside() {
    let dir = std::env::temp_dir().join(format!("dray-kept-aside-{}", std::process::id()));
    let aside = dir.clone();
    simulate(9, async move {
        let site = LeasedSite::new();
        let other = site.client("other", YES).await;
        let memory = SessionMemory::create_memfd().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        let (scope, one) = process(&site, memory, (false, Some(aside.clone()))).await;
        let (entry, file) = create(&one, site.root).await;
        write(&file, 2, b"mine").await;
        scope.kill();
        site.network.break_all("one");
        let theirs = open(&other, entry.id).await;
        write(&theirs, 0, b"theirs").await;
        let memory = SessionMemory::from_fd(fd).unwrap();
        let (_scope, one) = process(&site, memory, (true, Some(aside))).await;
        one.attached();
        let begun = dray_rt::now();
        while kept(&one).lost == 0 && begun.elapsed() < TERM {
            sleep(std::time::Duration::from_millis(10)).await;
        }
        let status = kept(&one);
        assert_eq!((status.lost, status.aside, status.bytes), (1, 1, 0));
        assert_eq!(read(&theirs).await, b"theirs");
    });
    let files = std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path());
    let data = files.filter(|path| path.extension().is_some_and(|ending| ending == "data"));
    let data: Vec<_> = data.map(|path| std::fs::read(path).unwrap()).collect();
    std::fs::remove_dir_all(&dir).unwrap();
    assert_eq!(data, [b"\0\0mine"]);
}
