//! What the file system below is asked for, and what clients may hold.

use std::path::PathBuf;
use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Admit, Buf, BufMut, Context, CreateHow, Errno, Error, FileSystem, FsUuid, HolderId, IdMap,
    Name, NodeId, ObservedCall, Op, OpenFile, OpenHow, SetAttr, Write,
};
use dray_rt::{DriverKind, Executor, sleep};

use super::*;
use crate::{Observed, Observer, Outcome};

const CALL: usize = 4096;
const BLOCK: usize = BLOCK_BYTES;
const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };

/// Refuses writes while its flag is set.
#[derive(Default)]
struct FullDisk(std::sync::atomic::AtomicBool);

impl FullDisk {
    fn set(&self, full: bool) {
        self.0.store(full, std::sync::atomic::Ordering::SeqCst);
    }
}

impl Observer for FullDisk {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, _: &'a Context, call: &'a ObservedCall<'a>) -> Admit<'a> {
        let full = self.0.load(std::sync::atomic::Ordering::SeqCst);
        match full && call.op == Op::Write {
            true => Admit::Refuse(Error::new(Errno::ENOSPC)),
            false => Admit::Now,
        }
    }

    fn done(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {}
}

struct Site {
    /// Below the layer: changes through it are made outside dray.
    below: MemoryFs,
    disk: Arc<FullDisk>,
    layer: Arc<Aggregate>,
    path: PathBuf,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

const ERA: PendingEra = PendingEra { boot: 1, uuid: FsUuid(2) };

impl Site {
    fn new(name: &str) -> Site {
        let path = std::env::temp_dir().join(format!("dray-merged-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let below = MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let disk = Arc::new(FullDisk::default());
        let layer = Site::around(&below, &disk, &path, IdMap::default());
        Site { below, disk, layer, path }
    }

    fn around(
        below: &MemoryFs,
        disk: &Arc<FullDisk>,
        path: &std::path::Path,
        failed: IdMap<dray_core::FileId, Errno>,
    ) -> Arc<Aggregate> {
        let seen = Arc::new(Observed::new(Arc::new(below.clone()), disk.clone()));
        let pending = Some(PendingOptions { path: path.to_owned(), bytes: 8 * BLOCK, era: ERA });
        let options =
            AggregateOptions { read_ahead_bytes: 8 * BLOCK, pending, ..Default::default() };
        Arc::new(Aggregate::new(seen, options, failed).expect("room"))
    }

    fn counts(&self) -> AggregateCounts {
        self.layer.figures().counts()
    }

    async fn file(&self, name: &[u8]) -> Arc<dyn OpenFile> {
        let (cx, name) = (Context::system(), Name::new(name).unwrap());
        self.layer.create(&cx, self.layer.info().root, name, NEW).await.unwrap().1
    }

    /// The content as programs outside dray see it.
    async fn outside(&self, file: &dyn OpenFile, bytes: usize) -> Vec<u8> {
        let cx = Context::system();
        let below = self.below.open(&cx, file.id(), OpenHow::READ).await.unwrap();
        below
            .read(&cx, 0, BufMut::heap(bytes))
            .await
            .map_err(|(error, _)| error)
            .unwrap()
            .filled()
            .to_vec()
    }
}

async fn write(
    cx: &Context,
    file: &dyn OpenFile,
    at: usize,
    bytes: &[u8],
) -> dray_core::Result<usize> {
    file.write(cx, Write::at(at as u64), Buf::from(bytes)).await
}

async fn read(file: &dyn OpenFile, at: usize, bytes: usize) -> Vec<u8> {
    let read = file.read(&Context::system(), at as u64, BufMut::heap(bytes)).await;
    read.map_err(|(error, _)| error).unwrap().filled().to_vec()
}

async fn fill(cx: &Context, file: &dyn OpenFile, bytes: usize) {
    for number in 0..bytes / CALL {
        assert_eq!(write(cx, file, number * CALL, &[number as u8; CALL]).await.unwrap(), CALL);
    }
}

fn simulated(test: impl Future<Output = ()>) {
    Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(test);
}

// proves: P165
#[test]
fn small_writes_become_large_ones() {
    simulated(async {
        let (site, cx) = (Site::new("large"), Context::system());
        let file = site.file(b"f").await;
        fill(&cx, &*file, 4 * BLOCK).await;
        file.sync(&cx, false).await.unwrap();
        let counts = site.counts();
        // The first call is passed on, and the rest of the first block is a request of its own.
        assert_eq!((counts.writes_passed, counts.late_requests), (1, 4), "{counts:?}");
        assert_eq!(counts.late_bytes, (4 * BLOCK - CALL) as u64);
        assert_eq!(counts.pending_bytes, 0);
        let below = site.outside(&*file, 4 * BLOCK).await;
        assert!(below.chunks(CALL).enumerate().all(|(number, part)| part == [number as u8; CALL]));
    });
}

// proves: P165
#[test]
fn streams_are_read_in_large_pieces() {
    simulated(async {
        let (site, cx) = (Site::new("streams"), Context::system());
        let file = site.file(b"f").await;
        fill(&cx, &*file, 4 * BLOCK).await;
        file.sync(&cx, false).await.unwrap();
        let before = site.counts();
        for number in 0..4 * BLOCK / CALL {
            assert_eq!(read(&*file, number * CALL, CALL).await, [number as u8; CALL]);
            dray_rt::yield_now().await;
        }
        assert!(read(&*file, 4 * BLOCK, CALL).await.is_empty());
        let counts = site.counts();
        // The first read, and the one at the end of the file.
        assert_eq!(counts.reads_passed - before.reads_passed, 2, "{counts:?}");
        assert!(counts.ahead_requests <= 5, "{counts:?}");
        sleep(2 * AGE_MAX).await;
        assert_eq!(site.counts().ahead_held_bytes, 0, "memory is given back");
    });
}

/// Each client takes every fourth piece of 2 MiB.
// proves: P165
#[test]
fn strided_streams_are_read_before_they_are_asked_for() {
    simulated(async {
        let (site, cx) = (Site::new("strided"), Context::system());
        let file = site.file(b"f").await;
        file.setattr(&cx, SetAttr { size: Some(64 << 20), ..SetAttr::default() }).await.unwrap();
        for number in 0..24 {
            let piece = read(&*file, number * (2 << 20), CALL).await;
            assert_eq!(piece.len(), CALL);
            for _ in 0..20 {
                dray_rt::yield_now().await;
            }
        }
        let counts = site.counts();
        assert!(counts.read_hits >= 16, "{counts:?}");
    });
}

/// Changes outside dray are seen within a second, in both directions.
// proves: P165
#[test]
fn nothing_is_older_than_a_second() {
    simulated(async {
        let (site, cx) = (Site::new("second"), Context::system());
        let file = site.file(b"f").await;
        fill(&cx, &*file, 16 * CALL).await;
        assert_eq!(site.outside(&*file, BLOCK).await.len(), CALL, "the rest is pending");
        sleep(AGE_MAX + AGE_MAX / 2).await;
        assert_eq!(site.outside(&*file, BLOCK).await.len(), 16 * CALL);
        for number in 0..4 {
            read(&*file, number * CALL, CALL).await;
        }
        let below = site.below.open(&cx, file.id(), OpenHow::READ_WRITE).await.unwrap();
        write(&cx, &*below, 4 * CALL, &[77; CALL]).await.unwrap();
        sleep(AGE_MAX + AGE_MAX / 2).await;
        assert_eq!(read(&*file, 4 * CALL, CALL).await, [77; CALL]);
    });
}

// proves: P168
#[test]
fn a_late_error_is_reported_through_each_open_file() {
    simulated(async {
        let (site, cx) = (Site::new("error"), Context::system());
        let file = site.file(b"f").await;
        let other = site.layer.open(&cx, file.id(), OpenHow::READ_WRITE).await.unwrap();
        fill(&cx, &*file, 4 * CALL).await;
        site.disk.set(true);
        let enospc = |result: dray_core::Result<()>| result.unwrap_err().errno() == Errno::ENOSPC;
        assert!(enospc(file.sync(&cx, false).await));
        file.sync(&cx, false).await.unwrap();
        assert!(enospc(other.flush(&cx, dray_core::LockOwner::own(1)).await));
        assert!(enospc(site.layer.sync_all(&cx).await), "what all believe to be on media is not");
        site.layer.sync_all(&cx).await.unwrap();
        site.disk.set(false);
        assert_eq!(site.counts().late_errors, 1);
        assert_eq!(site.counts().pending_bytes, 0);
        // A sync has reported it.
        write(&cx, &*file, 0, &[1; CALL]).await.unwrap();
        file.sync(&cx, false).await.unwrap();
        assert_eq!(site.outside(&*file, BLOCK).await, [1; CALL]);
    });
}

// proves: P166
#[test]
fn what_cannot_be_written_after_a_death_is_reported_to_who_opens_the_file_again() {
    simulated(async {
        let (mut site, cx) = (Site::new("again"), Context::system());
        let file = site.file(b"f").await;
        fill(&cx, &*file, 4 * CALL).await;
        let id = file.id();
        drop(file);
        // As if it died: nobody writes what is pending.
        let old = std::mem::replace(&mut site.layer, Arc::new(Site::nothing(&site.below)));
        drop(old);
        site.disk.set(true);
        let seen = Observed::new(Arc::new(site.below.clone()), site.disk.clone());
        let lost = recover(&site.path, ERA, &seen, || true).await;
        assert!(lost.is_err(), "the file system has gone: it is tried again");
        let recovered = recover(&site.path, ERA, &seen, || false).await.unwrap();
        assert_eq!(recovered.failed.get(&id), Some(&Errno::ENOSPC));
        site.disk.set(false);
        site.layer = Site::around(&site.below, &site.disk, &site.path, recovered.failed);
        let again = site.layer.open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
        assert_eq!(again.sync(&cx, false).await.unwrap_err().errno(), Errno::ENOSPC);
        again.sync(&cx, false).await.unwrap();
        let next = recover(&site.path, ERA, &seen, || false).await;
        assert!(next.is_err(), "it is in use");
    });
}

impl Site {
    fn nothing(below: &MemoryFs) -> Aggregate {
        let options = AggregateOptions::default();
        Aggregate::new(Arc::new(below.clone()), options, IdMap::default())
            .expect("nothing is needed")
    }
}

/// A client that writes or reads everywhere has half of the memory. Others have room then.
// proves: P169
#[test]
fn no_client_has_all_of_the_memory() {
    simulated(async {
        let site = Site::new("shares");
        let client = |number| Context {
            holder: HolderId(number),
            ..Context::system().on_behalf_of(NodeId(number))
        };
        let (greedy, other) = (client(1), client(2));
        let (one, two) = (site.file(b"one").await, site.file(b"two").await);
        for block in 0..20 {
            write(&greedy, &*one, block * BLOCK, &[1; CALL]).await.unwrap();
        }
        let pending = site.counts().pending_bytes;
        assert_eq!(pending, (4 * CALL) as u64, "half of eight blocks");
        write(&other, &*two, 0, &[2; CALL]).await.unwrap();
        write(&other, &*two, CALL, &[2; CALL]).await.unwrap();
        assert_eq!(site.counts().pending_bytes, pending + CALL as u64);
        one.sync(&greedy, false).await.unwrap();
        for stream in 0..20 {
            for number in 0..2 {
                let at = (stream * BLOCK + number * CALL) as u64;
                let read = one.read(&greedy, at, BufMut::heap(CALL)).await;
                assert!(read.is_ok());
            }
        }
        assert!(site.counts().ahead_held_bytes <= (4 * BLOCK) as u64);
    });
}
