//! Few clients and many read one file together, past every cache. The server's disk should stay the limit,
//! and each client should get as much as the others.

use std::time::{Duration, Instant};

use dray_core::{Buf, BufMut, Context, FileId, FileSystem, OpenFile, OpenHow, Write};

use super::Many;
use super::crowd::{GroupMember, MemberReport};
use super::restarts::make;
use super::spread::Spread;
use crate::{CommandResult, context};

/// The file that all read.
const FILE_BYTES: u64 = 64 << 20;
/// One request, which O_DIRECT takes as it is.
const READ_BYTES: usize = 32 << 10;
/// Bytes that one write of the file's content brings.
const FILL_BYTES: usize = 1 << 20;
/// Each number of clients that reads, as far as there are so many.
const CROWDS: [usize; 5] = [4, 20, 100, 1000, 10_000];
/// How long they read, at least; and more for each of many, so that each has some reads to compare.
const READ_FOR: Duration = Duration::from_secs(4);
const READ_FOR_EACH: Duration = Duration::from_millis(4);

impl Many {
    /// Rates and shares of each number of clients.
    pub(super) fn together(&mut self) -> CommandResult {
        let file = self.filled_file()?;
        for crowd in CROWDS.into_iter().filter(|crowd| *crowd <= self.crowd.count) {
            self.read_together(crowd, file);
        }
        Ok(())
    }

    fn filled_file(&self) -> CommandResult<FileId> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.crowd
            .begin(0..1, move |member, mut report| {
                let sender = sender.clone();
                async move {
                    if let Some(id) = report.step(fill(&member)).await {
                        let _ = sender.send(id); // it is waited for
                    }
                    report
                }
            })
            .wait();
        receiver.recv().map_err(context("the file that all read"))
    }

    fn read_together(&self, crowd: usize, file: FileId) {
        let open = move |member: std::sync::Arc<GroupMember>, mut report: MemberReport| async move {
            let how = OpenHow::new(libc::O_RDONLY | libc::O_DIRECT);
            let opened = report.step(member.fs.open(&Context::system(), file, how)).await;
            opened.into_iter().for_each(|file| member.keep(file));
            report
        };
        self.crowd.begin(0..crowd, open).wait();
        let before = self.server.look();
        let read_for = READ_FOR.max(READ_FOR_EACH * crowd as u32);
        let until = Instant::now() + read_for;
        let read = move |member, report| read_until(member, report, until);
        let done = self.crowd.begin(0..crowd, read).wait();
        let after = self.server.look();
        let metric = format!("together_by{crowd}");
        let ops = done.steps().count();
        let reads: Vec<f64> = done.0.iter().map(|one| one.steps.len() as f64).collect();
        let mib = ops as f64 * READ_BYTES as f64 / f64::from(1 << 20);
        let mib_per_s = mib / read_for.as_secs_f64();
        let fairness = jain(&reads);
        let reads = Spread::new(reads);
        for (name, part) in [("min", 0.0), ("p50", 0.5), ("max", 1.0)] {
            self.says.put(&format!("{metric}_reads_{name}"), reads.part(part), "1");
        }
        self.says.put(&format!("{metric}_mib_per_s"), mib_per_s, "MiB/s");
        self.says.put(&format!("{metric}_jain"), fairness, "ratio");
        self.says.server(&metric, (before, after), ops);
        self.says.failures(&metric, &done);
        let close = |member: std::sync::Arc<GroupMember>, mut report: MemberReport| async move {
            for file in member.give_up_files() {
                report.step(file.close(&Context::system())).await;
            }
            report
        };
        self.crowd.begin(0..crowd, close).wait();
    }
}

async fn fill(member: &GroupMember) -> dray_core::Result<FileId> {
    let (cx, file) = (Context::system(), make(member, "together").await?);
    let data = Buf::from(&vec![7; FILL_BYTES][..]);
    for at in (0..FILE_BYTES).step_by(FILL_BYTES) {
        file.write(&cx, Write::at(at), data.clone()).await?;
    }
    file.sync(&cx, false).await?;
    file.close(&cx).await?;
    Ok(file.id())
}

/// Reads one block after the other, from a place of its own on. A read that ends after `until` does not count.
async fn read_until(
    member: std::sync::Arc<GroupMember>,
    mut report: MemberReport,
    until: Instant,
) -> MemberReport {
    let Some(file) = member.files().first().cloned() else {
        report.failures.push("no file".into());
        return report;
    };
    let blocks = FILE_BYTES / READ_BYTES as u64;
    let mut block = member.number as u64 * 7919 % blocks;
    while report.failures.is_empty() && Instant::now() < until {
        report.step(read_block(&*file, block * READ_BYTES as u64)).await;
        if Instant::now() >= until {
            report.steps.pop();
        }
        block = (block + 1) % blocks;
    }
    report
}

async fn read_block(file: &dyn OpenFile, at: u64) -> dray_core::Result<()> {
    let into = BufMut::heap(READ_BYTES);
    let read = file.read(&Context::system(), at, into).await.map_err(|(error, _)| error)?;
    match read.len() {
        READ_BYTES => Ok(()),
        len => {
            Err(dray_core::Error::new(dray_core::Errno::EIO)
                .because(format!("{len} bytes were read")))
        }
    }
}

/// Jain's fairness index of shares: 1 where all are equal, 1/n where one has everything (Jain, Chiu, Hawe
/// 1984). 1 of none.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_shares_are_fair_and_one_that_has_all_is_not() {
        assert_eq!(jain(&[2.0; 10]), 1.0);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-9);
        assert_eq!(jain(&[]), 1.0);
    }
}
