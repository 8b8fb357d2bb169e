//! Many clients contend for one thing. The cost of one operation at the server should not depend on how many
//! others wait.

use std::sync::Arc;

use dray_core::{
    Buf, BufMut, Context, FileId, FileSystem, LockKind, Name, OpenHow, RenameHow, Write,
};

use super::Many;
use super::crowd::{GroupMember, MemberReport};
use super::restarts::{lock, make};
use crate::{CommandResult, context};

/// Operations of all clients together.
const OPERATIONS: usize = 4000;
/// Bytes of large ones, which wait for the server's memory.
const LARGE_BYTES: usize = 256 << 10;
/// Each number of clients that contends, as far as there are so many.
const CROWDS: [usize; 4] = [10, 100, 1000, 4000];

/// What they all want.
#[derive(Clone, Copy, Debug)]
enum ContendedOperation {
    Create,
    Rename,
    Append,
    Lock,
    Read,
    WriteLarge,
}

const WISHES: [(&str, ContendedOperation); 6] = [
    ("create", ContendedOperation::Create),
    ("rename", ContendedOperation::Rename),
    ("append", ContendedOperation::Append),
    ("lock", ContendedOperation::Lock),
    ("read", ContendedOperation::Read),
    ("write256k", ContendedOperation::WriteLarge),
];

impl Many {
    /// Each wish, by few and by many.
    pub(super) fn contention(&mut self) -> CommandResult {
        let shared = self.shared_file()?;
        for crowd in CROWDS.into_iter().filter(|crowd| *crowd <= self.crowd.count) {
            for (name, wish) in WISHES {
                self.contend((name, wish), crowd, shared);
            }
        }
        Ok(())
    }

    /// The file that all use.
    fn shared_file(&self) -> CommandResult<FileId> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.crowd.begin(0..1, move |member, mut report| {
            let sender = sender.clone();
            async move {
                if let Some(file) = report.step(make(&member, "shared")).await {
                    let how = Write::at(0);
                    let data = Buf::from(&[7; 4096][..]);
                    report.step(file.write(&Context::system(), how, data)).await;
                    let _ = sender.send(file.id()); // it is waited for
                }
                report
            }
        });
        receiver.recv().map_err(context("the shared file"))
    }

    fn contend(&self, (name, wish): (&str, ContendedOperation), crowd: usize, shared: FileId) {
        let rounds = (OPERATIONS / crowd).max(1);
        self.crowd
            .begin(0..crowd, move |member, report| prepare(member, report, wish, shared))
            .wait();
        let before = self.server.look();
        let work = move |member, report| contend(member, report, wish, rounds);
        let done = self.crowd.begin(0..crowd, work).wait();
        let after = self.server.look();
        let metric = format!("{name}_by{crowd}");
        let ops = done.steps().count();
        self.says.server(&metric, (before, after), ops);
        let wall = done.whole().part(1.0);
        self.says.put(&format!("{metric}_per_s"), ops as f64 / wall.max(1e-9), "1/s");
        self.says.spread_ms(&metric, &done.steps());
        // The one that was done last against the middle one.
        let last = wall / done.whole().part(0.5).max(1e-9);
        self.says.put(&format!("{metric}_last_to_middle"), last, "ratio");
        self.says.failures(&metric, &done);
        self.crowd.begin(0..crowd, remove_files).wait();
    }
}

/// Opens or makes what it works on, which comes first among its files.
async fn prepare(
    member: Arc<GroupMember>,
    mut report: MemberReport,
    wish: ContendedOperation,
    shared: FileId,
) -> MemberReport {
    let cx = Context::system();
    let file = match wish {
        ContendedOperation::Create => return report,
        ContendedOperation::Append | ContendedOperation::Lock | ContendedOperation::Read => {
            report.step(member.fs.open(&cx, shared, OpenHow::READ_WRITE)).await
        }
        ContendedOperation::Rename | ContendedOperation::WriteLarge => {
            report.step(make(&member, &own_name(&member, 0))).await
        }
    };
    if let (ContendedOperation::WriteLarge, Some(file)) = (wish, &file) {
        // So that the memory below is there, and no part of what is measured.
        report.step(file.write(&cx, Write::at(0), Buf::from(&LARGE_DATA[..]))).await;
    }
    file.into_iter().for_each(|file| member.keep(file));
    report
}

fn own_name(member: &GroupMember, round: usize) -> String {
    format!("c{}.{round}", member.number)
}

async fn contend(
    member: Arc<GroupMember>,
    mut report: MemberReport,
    wish: ContendedOperation,
    rounds: usize,
) -> MemberReport {
    let (cx, root) = (Context::system(), member.fs.info().root);
    let file = member.files().first().cloned();
    for round in 0..rounds {
        match (wish, &file) {
            (ContendedOperation::Create, _) => {
                let made = report.step(make(&member, &own_name(&member, round))).await;
                made.into_iter().for_each(|file| member.keep(file));
            }
            (ContendedOperation::Rename, _) => {
                let (from, to) = (own_name(&member, round), own_name(&member, round + 1));
                let (Ok(from), Ok(to)) = (Name::new(from.as_bytes()), Name::new(to.as_bytes()))
                else {
                    continue;
                };
                let how = RenameHow::Replace;
                report.step(member.fs.rename(&cx, (root, from), (root, to), how)).await;
            }
            (ContendedOperation::Append, Some(file)) => {
                let how = Write { append: true, ..Write::default() };
                report.step(file.write(&cx, how, Buf::from(&[7; 100][..]))).await;
            }
            (ContendedOperation::Lock, Some(file)) => {
                report.step(file.lock(&cx, lock(LockKind::Exclusive, 0), true)).await;
                let given_back = file.lock(&cx, lock(LockKind::Unlock, 0), false).await;
                report.failures.extend(given_back.err().map(|error| error.to_string()));
            }
            (ContendedOperation::Read, Some(file)) => {
                let read = async {
                    file.read(&cx, 0, BufMut::heap(4096)).await.map_err(|(error, _)| error)
                };
                report.step(read).await;
            }
            (ContendedOperation::WriteLarge, Some(file)) => {
                let data = Buf::from(&LARGE_DATA[..]);
                report.step(file.write(&cx, Write::at(0), data)).await;
            }
            _ => report.failures.push("no file".into()),
        }
    }
    report
}

static LARGE_DATA: [u8; LARGE_BYTES] = [7; LARGE_BYTES];

async fn remove_files(member: Arc<GroupMember>, mut report: MemberReport) -> MemberReport {
    for file in member.give_up_files() {
        report.step(file.close(&Context::system())).await;
    }
    report
}
