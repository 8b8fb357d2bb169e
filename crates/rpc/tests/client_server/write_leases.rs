//! Files whose writes a client may keep: who sees them, and what becomes of them if it is cut off.

use std::sync::Arc;

use crate::common::leased_site::{KEEPS, LeasedSite, TERM, YES};
use crate::common::simulate;
use dray_core::{
    Buf, BufMut, Context, CreateHow, Entry, Errno, FileId, FileSystem, Name, OpenFile, OpenHow,
    Write,
};
use dray_rpc::client::{KeptWritesStatus, RemoteFs};
use dray_rt::sleep;

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
        // Its creation, all of its data, and its locks, of which a mount knows by itself that there are none.
        assert_eq!(calls(&site) - before, 3);
        file.close(&cx).await.unwrap();
        let status = kept(&one);
        assert_eq!((status.writes, status.files, status.late, status.lost), (10, 0, 0, 0));
        assert_eq!(site.server.status().leases[0].1.written, 0, "the lease went back with them");
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
