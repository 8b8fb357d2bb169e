//! Many clients with leases: what a lease takes of the server's memory, what happens at rest, and a change of what
//! all have leased.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_core::{Context, CreateHow, FileId, FileSystem, Name, OpenHow};

use super::crowd::{Bystanders, GroupMember, MemberReport};
use super::{Many, ManyClientsPlan};
use crate::json::Value;
use crate::{CommandResult, context};

/// Files that each client has leased. With the directory that all have, and the one of its group, that is 100 leases.
const FILES: usize = 98;
/// Clients that have the same files leased.
const SHARERS: usize = 10;
/// Clients without leases, whose calls are timed.
const BYSTANDERS: usize = 32;
/// How long they are watched before the change.
const TIME: Duration = Duration::from_secs(3);
/// The directory that all have leased.
const SHARED: &str = "leased";

impl Many {
    /// Memory, rest, and a change that asks all.
    pub(super) fn leases(&mut self) -> CommandResult {
        let (count, groups) = (self.crowd.count, self.crowd.count.div_ceil(SHARERS));
        make_files(&self.plan.store.join(SHARED), groups)?;
        self.rest("unleased");
        // The server meets each file with its first client: what it remembers of files is no part of a lease.
        self.take_leases("lease_first", 0..groups, groups)?;
        self.take_leases("lease", groups..count, groups)?;
        self.rest("leased");
        self.change_what_all_have()
    }

    fn take_leases(&self, metric: &str, which: Range<usize>, groups: usize) -> CommandResult {
        let (before, held) = (self.server.look(), self.lease_counts()?.held);
        let take = move |member, report| take_leases(member, report, groups);
        let taken = self.crowd.begin(which, take).wait();
        let (after, held) = (self.server.look(), self.lease_counts()?.held - held);
        let bytes = (after.resident_kib.saturating_sub(before.resident_kib) << 10) as f64;
        self.says.put(&format!("{metric}_server_bytes"), bytes / held.max(1.0), "B/lease");
        self.says.put(&format!("{metric}_held"), held, "1");
        self.says.server(metric, (before, after), taken.steps().count());
        self.says.failures(metric, &taken);
        Ok(())
    }

    /// One client makes a file in the directory that all have leased.
    fn change_what_all_have(&self) -> CommandResult {
        let plan = ManyClientsPlan { leases: false, ..self.plan.clone() };
        let mut bystanders = Bystanders::new(&plan, BYSTANDERS)?;
        bystanders.begin();
        std::thread::sleep(TIME);
        self.says.spread_ms("recall_before_others", &bystanders.end().steps());
        let counts = self.lease_counts()?;
        bystanders.begin();
        let before = self.server.look();
        let changed = self.crowd.begin(0..1, change).wait();
        let after = self.server.look();
        let seen = bystanders.end();
        let asked = self.lease_counts()?.since(&counts);
        self.says.put("recall_all_ms", changed.steps().part(1.0) * 1e3, "ms");
        self.says.put("recall_all_sent", asked.recalls, "1");
        self.says.put("recall_all_acknowledged", asked.acknowledged, "1");
        self.says.put("recall_all_fences", asked.fences, "1");
        self.says.server("recall_all", (before, after), asked.recalls as usize);
        self.says.failures("recall_all", &changed);
        self.says.spread_ms("recall_all_others", &seen.steps());
        self.says.failures("recall_all_others", &seen);
        Ok(())
    }

    fn lease_counts(&self) -> CommandResult<LeaseCounts> {
        let (text, _) = self.ask_status(&["--json", "--interval", "0"])?;
        LeaseCounts::of(&text).ok_or_else(|| "the status says nothing of leases".to_owned())
    }
}

/// What the status of a server says of the leases of its first export.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LeaseCounts {
    held: f64,
    recalls: f64,
    acknowledged: f64,
    fences: f64,
}

impl LeaseCounts {
    fn of(status: &str) -> Option<LeaseCounts> {
        let status = Value::parse(status)?;
        let Value::List(exports) = status.get("exports")? else { return None };
        let leases = exports.first()?.get("leases")?;
        let count = |key| leases.get(key)?.number();
        Some(LeaseCounts {
            held: count("held")?,
            recalls: count("recalls")?,
            acknowledged: count("acknowledged")?,
            fences: count("fences")?,
        })
    }

    fn since(self, before: &LeaseCounts) -> LeaseCounts {
        LeaseCounts {
            held: self.held - before.held,
            recalls: self.recalls - before.recalls,
            acknowledged: self.acknowledged - before.acknowledged,
            fences: self.fences - before.fences,
        }
    }
}

/// Made beside the server, which has not met them.
fn make_files(shared: &Path, groups: usize) -> CommandResult {
    for group in 0..groups {
        let dir = shared.join(format!("g{group}"));
        fs::create_dir_all(&dir).map_err(context("a directory of files to lease"))?;
        for file in 0..FILES {
            fs::write(dir.join(format!("f{file}")), b"").map_err(context("a file to lease"))?;
        }
    }
    Ok(())
}

async fn take_leases(
    member: Arc<GroupMember>,
    mut report: MemberReport,
    groups: usize,
) -> MemberReport {
    let root = member.fs.info().root;
    let group = format!("g{}", member.number % groups);
    let Some(shared) = report.step(look_up(&member, root, SHARED)).await else { return report };
    let Some(dir) = report.step(look_up(&member, shared, &group)).await else { return report };
    for file in 0..FILES {
        report.step(look_up(&member, dir, &format!("f{file}"))).await;
    }
    report
}

async fn look_up(member: &GroupMember, dir: FileId, name: &str) -> dray_core::Result<FileId> {
    let name = Name::new(name.as_bytes())?;
    member.fs.lookup(&Context::system(), dir, name).await.map(|entry| entry.id)
}

async fn change(member: Arc<GroupMember>, mut report: MemberReport) -> MemberReport {
    let made = async {
        let (cx, root) = (Context::system(), member.fs.info().root);
        let shared = look_up(&member, root, SHARED).await?;
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
        member.fs.create(&cx, shared, Name::new(b"new")?, how).await
    };
    if let Some((_, file)) = report.step(made).await {
        let closed = file.close(&Context::system()).await;
        report.failures.extend(closed.err().map(|error| error.to_string()));
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_leases_are_found_in_the_status() {
        let status =
            |leases: &str| format!(r#"{{"exports":[{{"name":"data","leases":{leases}}}]}}"#);
        let text =
            status(r#"{"held":7,"written":0,"recalls":5,"acknowledged":4,"expired":1,"fences":1}"#);
        let counts = LeaseCounts::of(&text).unwrap();
        let expected = LeaseCounts { held: 7.0, recalls: 5.0, acknowledged: 4.0, fences: 1.0 };
        assert_eq!(counts, expected);
        assert_eq!(counts.since(&expected), LeaseCounts::default());
        assert_eq!(LeaseCounts::of(&status("null")), None);
    }
}
