//! Observers around a real stack.

use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileSystem, Make, Name, Op, OpenHow, Write,
};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_layers::metrics::Metrics;
use dray_rt::{DriverKind, Executor, now};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

fn simulate<T>(test: impl Future<Output = T>) -> T {
    Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(test)
}

fn memory() -> Arc<dyn FileSystem> {
    Arc::new(MemoryFs::new(MemoryOptions::default()))
}

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn fault(op: Op, when: When, error: Errno) -> Fault {
    Fault { op: Some(op), when, delay: Duration::ZERO, error: Some(error) }
}

#[test]
fn metrics_see_what_happens_through_two_observers() {
    simulate(async {
        let (outer, inner) = (Arc::new(Metrics::new()), Arc::new(Metrics::new()));
        let below: Arc<dyn FileSystem> = Arc::new(Observed::new(memory(), inner.clone()));
        let fs = Observed::new(below, outer.clone());
        let (cx, root) = (Context::system(), fs.info().root);
        let (_, file) = fs.create(&cx, root, name("a"), NEW).await.unwrap();
        let (_, other) = fs.create(&cx, root, name("b"), NEW).await.unwrap();
        file.write(&cx, Write::at(0), Buf::from(vec![7; 1000])).await.unwrap();
        assert_eq!(file.read(&cx, 900, BufMut::heap(500)).await.unwrap().len(), 100);
        assert_eq!(file.copy_range(&cx, 0, &*other, 0, 1000).await.unwrap(), 1000);
        assert!(fs.lookup(&cx, root, name("c")).await.is_err());
        assert_eq!(outer.snapshot().ops.len(), inner.snapshot().ops.len());
        let snapshot = outer.snapshot();
        let of = |op| snapshot.ops.iter().find(|one| one.op == op).unwrap();
        assert_eq!((of(Op::Write).bytes, of(Op::Read).bytes), (1000, 100));
        assert_eq!((of(Op::CopyRange).bytes, of(Op::Create).count), (1000, 2));
        assert_eq!(of(Op::Lookup).errors["ENOENT"], 1);
    });
}

#[test]
fn the_nth_call_fails_and_is_not_carried_out() {
    simulate(async {
        let faults = Arc::new(Faults::new(vec![fault(Op::Make, When::Nth(2), Errno::ENOSPC)]));
        let fs = Observed::new(memory(), faults.clone());
        let (cx, root) = (Context::system(), fs.info().root);
        let dir = Make::Directory { mode: 0o755 };
        fs.make(&cx, root, name("1"), dir).await.unwrap();
        let error = fs.make(&cx, root, name("2"), dir).await.unwrap_err();
        assert_eq!((error.errno(), error.op()), (Errno::ENOSPC, Some(Op::Make)));
        assert!(fs.lookup(&cx, root, name("2")).await.is_err());
        fs.make(&cx, root, name("2"), dir).await.unwrap();
        assert_eq!(faults.hits(), 1);
    });
}

#[test]
fn a_failed_read_gives_the_buffer_back() {
    simulate(async {
        let faults = Arc::new(Faults::new(vec![fault(Op::Read, When::Always, Errno::EIO)]));
        let fs = Observed::new(memory(), faults);
        let cx = Context::system();
        let (_, file) = fs.create(&cx, fs.info().root, name("a"), NEW).await.unwrap();
        let (error, into) = file.read(&cx, 0, BufMut::heap(64)).await.unwrap_err();
        assert_eq!((error.errno(), into.capacity()), (Errno::EIO, 64));
    });
}

#[test]
fn delays_take_their_time_and_the_call_goes_on() {
    simulate(async {
        let late = |millis| Fault {
            op: None,
            when: When::Always,
            delay: Duration::from_millis(millis),
            error: None,
        };
        let fs = Observed::new(memory(), Arc::new(Faults::new(vec![late(200), late(100)])));
        let begin = now();
        fs.getattr(&Context::system(), fs.info().root).await.unwrap();
        assert_eq!(begin.elapsed(), Duration::from_millis(300));
    });
}

#[test]
fn one_in_n_hits_about_that_many() {
    simulate(async {
        let faults = Arc::new(Faults::new(vec![fault(Op::Getattr, When::OneIn(4), Errno::EIO)]));
        let fs = Observed::new(memory(), faults.clone());
        for _ in 0..400 {
            let _ = fs.getattr(&Context::system(), fs.info().root).await;
        }
        assert!((60..140).contains(&faults.hits()), "{}", faults.hits());
    });
}
