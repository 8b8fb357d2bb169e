//! Observers around a real stack.

use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Attr, Buf, BufMut, Context, CreateHow, Errno, FileId, FileSystem, FindJobs, Fut, GrantedAdmit,
    HearChanges, HearRecalls, IO_MAX_BYTES, LockOwner, Make, Name, NodeId, ObservedCall, Op,
    OpenFile, OpenHow, RequestId, SessionControl, Stack, Write, put_in_steps,
};
use dray_layers::faults::{Fault, Faults, When};
use dray_layers::metrics::Metrics;
use dray_layers::{Observed, ObservedExport, observe_export, observed_stack};
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

/// A put was a call of remote file systems alone, which no observer saw.
#[test]
fn a_put_is_one_call_with_its_bytes() {
    simulate(async {
        let seen = Arc::new(Metrics::new());
        let fs = Observed::new(memory(), seen.clone());
        let (cx, root) = (Context::system(), fs.info().root);
        for content in [&b"first"[..], b"2nd"] {
            fs.put(&cx, root, name("a"), 0o640, Buf::from(content)).await.unwrap();
        }
        let snapshot = seen.snapshot();
        let ops: Vec<_> = snapshot.ops.iter().filter(|one| one.count > 0).collect();
        assert_eq!(ops.len(), 1, "{ops:?}");
        assert_eq!((ops[0].op, ops[0].count, ops[0].bytes), (Op::Put, 2, 8));
        let entry = fs.lookup(&cx, root, name("a")).await.unwrap();
        assert_eq!((entry.attr.size, entry.attr.mode & 0o7777), (3, 0o640));
        let too_much = Buf::from(vec![0; IO_MAX_BYTES + 1]);
        let refused = fs.put(&cx, root, name("b"), 0o640, too_much).await.unwrap_err();
        assert_eq!(refused.errno(), Errno::EINVAL);
        assert!(fs.lookup(&cx, root, name("b")).await.is_err(), "nothing was made");
    });
}

#[test]
fn a_put_in_steps_says_that_writing_failed() {
    simulate(async {
        let faults = Arc::new(Faults::new(vec![fault(Op::Write, When::Always, Errno::ENOSPC)]));
        let fs = Observed::new(memory(), faults);
        let (cx, root) = (Context::system(), fs.info().root);
        let place = (root, name("a"));
        let put = put_in_steps(&fs, &cx, place, 0o640, Buf::from(&b"data"[..])).await;
        assert_eq!(put.unwrap_err().errno(), Errno::ENOSPC);
        put_in_steps(&fs, &cx, place, 0o640, Buf::from(&b""[..])).await.unwrap();
    });
}

/// A session at which a process before this one left one file open.
struct OneFileSession(Arc<dyn OpenFile>);

impl SessionControl for OneFileSession {
    fn node(&self) -> NodeId {
        NodeId(7)
    }
    fn attach(&self, id: FileId, _: OpenHow, _: RequestId) -> Option<Arc<dyn OpenFile>> {
        (id == self.0.id()).then(|| self.0.clone())
    }
    fn attached(&self) {}

    fn release_inherited(&self) {}
    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        Some(vec![(self.0.id(), LockOwner::own(3))])
    }
    fn owes_error(&self, id: FileId) -> bool {
        id == self.0.id()
    }
    fn mapped(&self, _: FileId) {}
    fn hear_changes_by(&self, _: HearChanges) {}
    fn hear_recalls_by(&self, _: HearRecalls) {}

    fn leased_attributes(&self, _: FileId) -> Option<Attr> {
        None
    }
    fn find_jobs_by(&self, _: FindJobs) {}
    fn finish(&self) -> Fut<'_, ()> {
        Box::pin(async {})
    }

    fn goodbye(&self) {}
}

#[test]
fn files_that_are_attached_are_seen_as_those_that_are_opened() {
    simulate(async {
        let (fs, cx) = (memory(), Context::system());
        let (entry, file) = fs.create(&cx, fs.info().root, name("a"), NEW).await.unwrap();
        let seen = Arc::new(Metrics::new());
        let stack = Stack { fs, session: Arc::new(OneFileSession(file)) };
        let Stack { session, .. } = observed_stack(stack, &seen);
        let attached = session.attach(entry.id, OpenHow::READ, RequestId(1)).unwrap();
        attached.getattr(&cx).await.unwrap();
        let counted =
            |op| seen.snapshot().ops.iter().filter(|one| one.op == op && one.count == 1).count();
        assert_eq!(counted(Op::Getattr), 1);
        let other = FileId { ino: u64::MAX, generation: 0 };
        assert!(session.attach(other, OpenHow::READ, RequestId(2)).is_none());
        let answers = (session.node(), session.owes_error(entry.id), session.lock_owners());
        assert_eq!(answers, (NodeId(7), true, Some(vec![(entry.id, LockOwner::own(3))])));
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

/// An observer behind one that delays is asked after the delay, and all learn of a refusal.
#[test]
fn observers_of_an_export_admit_one_after_the_other() {
    simulate(async {
        let late = Fault {
            delay: Duration::from_millis(200),
            ..fault(Op::Make, When::Always, Errno::EIO)
        };
        let late = Arc::new(Faults::new(vec![Fault { error: None, ..late }]));
        let never = Arc::new(Faults::new(vec![fault(Op::Make, When::Nth(2), Errno::EDQUOT)]));
        let metrics = Arc::new(Metrics::new());
        let observers: Vec<Arc<dyn dray_layers::Observer>> =
            vec![late.clone(), never, metrics.clone()];
        let ObservedExport { fs, admission } = observe_export(memory(), observers);
        let admission = admission.unwrap();
        let (cx, call) = (Context::system(), ObservedCall::new(Op::Make, fs.info().root));
        let begin = now();
        let mut ends = Vec::new();
        for _ in 0..2 {
            match admission.admit(&cx, &call) {
                GrantedAdmit::After(wait) => ends.push(wait.await.map(drop)),
                GrantedAdmit::Now(_) | GrantedAdmit::Refuse(_) => panic!("not delayed"),
            }
        }
        assert_eq!(begin.elapsed(), Duration::from_millis(400));
        let error = ends.pop().unwrap().unwrap_err();
        assert!(ends.pop().unwrap().is_ok() && error.errno() == Errno::EDQUOT);
        admission.refused(&cx, &call, &error, begin.elapsed());
        assert_eq!(metrics.snapshot().ops[0].errors["EDQUOT"], 1);
        fs.make(&cx, fs.info().root, name("a"), Make::Directory { mode: 0o755 }).await.unwrap();
        assert_eq!(late.hits(), 2, "the file system itself asks nobody");
    });
}

#[test]
fn nobody_is_asked_where_nobody_admits() {
    let observers: Vec<Arc<dyn dray_layers::Observer>> =
        vec![Arc::new(Metrics::new()), Arc::new(Faults::new(Vec::new()))];
    assert!(observe_export(memory(), observers).admission.is_none());
}
