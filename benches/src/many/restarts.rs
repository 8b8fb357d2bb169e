//! The cost of clients at rest, and the effects of the death of their server and of their own.

use std::time::{Duration, Instant};

use dray_core::{
    Buf, Context, CreateHow, FileSystem, Lock, LockFamily, LockKind, LockOwner, LockRange, Name,
    OpenFile, OpenHow, Pid, Write,
};

use dray_rt::random_u64;

use super::Many;
use super::crowd::{Bystanders, GroupMember, GroupReport, MemberReport};
use crate::{CommandResult, idle};

/// Files that each client has open, its own among them.
const FILES: usize = 10;
/// Locks that each holds on its own file.
const LOCKS: u64 = 2;
/// How long after a change of many the server is looked at.
const SETTLE: Duration = Duration::from_secs(2);
/// So many look on while something is done to the server.
const BYSTANDERS: usize = 16;
/// How often it is looked whether something has happened: each look costs the server, too.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// What has not happened by then does not.
const WAIT_MAX: Duration = Duration::from_secs(180);

pub(super) fn lock(kind: LockKind, at: u64) -> Lock {
    Lock {
        family: LockFamily::Posix,
        kind,
        range: LockRange { start: at, end: at },
        owner: LockOwner::own(1),
        pid: Pid(1),
    }
}

/// A new file in the export's root, open.
pub(super) async fn make(
    member: &GroupMember,
    name: &str,
) -> dray_core::Result<std::sync::Arc<dyn OpenFile>> {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: false };
    let (cx, root) = (Context::system(), member.fs.info().root);
    let (_, file) = member.fs.create(&cx, root, Name::new(name.as_bytes())?, how).await?;
    Ok(file)
}

/// Opens files, takes locks, and writes what is not synced.
async fn take_hold(member: &GroupMember) -> dray_core::Result<()> {
    let cx = Context::system();
    for file in member.give_up_files() {
        file.close(&cx).await?;
    }
    let own = make(member, &format!("own{}", member.number)).await?;
    member.keep(own.clone());
    for _ in 1..FILES {
        member.keep(member.fs.open(&cx, own.id(), OpenHow::READ).await?);
    }
    for at in 0..LOCKS {
        own.lock(&cx, lock(LockKind::Exclusive, at), false).await?;
    }
    write(&*own, 0).await
}

async fn write(file: &dyn OpenFile, at: u64) -> dray_core::Result<()> {
    file.write(&Context::system(), Write::at(at), Buf::from(&[7; 4096][..])).await.map(drop)
}

/// Writes to its own file, and locks another byte of it.
async fn write_and_lock(
    member: std::sync::Arc<GroupMember>,
    mut report: MemberReport,
) -> MemberReport {
    let Some(own) = member.files().first().cloned() else { return report };
    report.step(write(&*own, 4096)).await;
    report.step(own.lock(&Context::system(), lock(LockKind::Exclusive, LOCKS), false)).await;
    report
}

impl Many {
    /// No client wants anything.
    pub(super) fn idle(&mut self) -> CommandResult {
        self.rest("idle");
        Ok(())
    }

    pub(super) fn rest(&self, metric: &str) {
        std::thread::sleep(SETTLE);
        let (count, before) = (self.crowd.count as f64, self.server.look());
        let own = [std::process::id() as i32];
        let pids = [&[self.server.pid()][..], &own];
        let [of_server, of_clients] = idle::wakeups_of(pids, self.plan.idle);
        let after = self.server.look();
        let tenth = self.plan.idle.as_secs_f64() / 10.0;
        let says = |name: &str, value: f64, unit: &str| {
            self.says.put(&format!("{metric}_{name}"), value, unit);
        };
        let kib = after.resident_kib.saturating_sub(self.fresh.resident_kib) as f64;
        says("server_kib_per_client", kib / count, "KiB");
        let descriptors = after.descriptors.saturating_sub(self.fresh.descriptors) as f64;
        says("server_descriptors_per_client", descriptors / count, "1/client");
        says("server_wakeups_10s", of_server as f64 / tenth, "1/10s");
        let cpu = after.cpu.saturating_sub(before.cpu).as_secs_f64() * 1e3;
        says("server_cpu_ms_10s", cpu / tenth, "ms/10s");
        says("clients_wakeups_10s", of_clients as f64 / tenth, "1/10s");
    }

    /// Everybody has files open and locks, and has written something.
    pub(super) fn hold(&mut self) -> CommandResult {
        self.take_hold("hold");
        self.rest("hold");
        Ok(())
    }

    fn take_hold(&self, metric: &str) {
        let before = self.server.look();
        let held = self.crowd.all(|member, mut report| async move {
            report.step(take_hold(&member)).await;
            report
        });
        self.says.failures(metric, &held);
        self.says.server(metric, (before, self.server.look()), held.0.len());
    }

    /// The server is killed, and another one takes its place.
    pub(super) fn restart(&mut self) -> CommandResult {
        self.start_anew("restart", None)?;
        self.rest("restarted");
        Ok(())
    }

    /// The same, as after a loss of the machine's power: clients send again what was not synced.
    pub(super) fn power(&mut self) -> CommandResult {
        self.take_hold("power_hold");
        self.start_anew("power", Some(random_u64().into()))
    }

    fn start_anew(&mut self, metric: &str, boot: Option<u128>) -> CommandResult {
        let lines = self.server.log_lines();
        self.server.kill()?;
        let begin = Instant::now();
        let asked = self.crowd.begin(0..self.crowd.count, write_and_lock);
        self.server.start_again(boot)?;
        let listens = begin.elapsed().as_secs_f64() * 1e3;
        self.says.put(&format!("{metric}_listens_ms"), listens, "ms");
        let answered = asked.wait();
        self.report_restart(metric, &answered, lines);
        Ok(())
    }

    fn report_restart(&self, metric: &str, answered: &GroupReport, lines_before: usize) {
        self.says.spread_ms(metric, &answered.whole());
        self.says.failures(metric, answered);
        let cpu = self.server.look().cpu.as_secs_f64() * 1e3;
        self.says.put(&format!("{metric}_server_cpu_ms"), cpu, "ms");
        let lines = self.server.log_lines() - lines_before;
        self.says.put(&format!("{metric}_log_lines"), lines as f64, "1");
    }

    /// The same, and half of the clients have gone for ever.
    pub(super) fn restart_without_half(&mut self) -> CommandResult {
        let (all, half) = (self.crowd.count, self.crowd.count / 2);
        let lines = self.server.log_lines();
        self.server.kill()?;
        self.crowd.begin(half..all, die).wait();
        let begin = Instant::now();
        let asked = self.crowd.begin(0..half, write_and_lock);
        self.server.start_again(None)?;
        let answered = asked.wait();
        self.report_restart("half", &answered, lines);
        self.wait_for_clients(half)?;
        self.says.put("half_leases_ended_s", begin.elapsed().as_secs_f64(), "s");
        Ok(())
    }

    /// Waits until there are so many clients at the server.
    fn wait_for_clients(&self, count: usize) -> CommandResult {
        let begin = Instant::now();
        while self.clients()? > count {
            if begin.elapsed() > WAIT_MAX {
                return Err(format!("{} clients do not go", self.clients()? - count));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// All say goodbye at once.
    pub(super) fn leave(&mut self) -> CommandResult {
        self.go("leave", |member, report| async move {
            member.fs.session().goodbye();
            report
        })?;
        let count = self.crowd.count;
        self.crowd = super::crowd::ClientGroup::new(&self.plan, super::THREADS, 0)?;
        self.connect(count)
    }

    /// All die at once.
    pub(super) fn vanish(&mut self) -> CommandResult {
        self.take_hold("vanish_hold");
        self.go("vanish", die)
    }

    fn go<F>(
        &mut self,
        metric: &str,
        how: impl Fn(std::sync::Arc<GroupMember>, MemberReport) -> F + Send + Sync + 'static,
    ) -> CommandResult
    where
        F: Future<Output = MemberReport> + Send + 'static,
    {
        let mut bystanders = Bystanders::new(&self.plan, BYSTANDERS)?;
        let before = self.server.look();
        bystanders.begin();
        self.crowd.all(how);
        let begin = Instant::now();
        self.wait_for_clients(BYSTANDERS)?;
        self.says.put(&format!("{metric}_ended_s"), begin.elapsed().as_secs_f64(), "s");
        std::thread::sleep(SETTLE);
        let seen = bystanders.end();
        self.says.spread_ms(&format!("{metric}_others"), &seen.steps());
        self.says.failures(&format!("{metric}_others"), &seen);
        let after = self.server.look();
        self.says.server(metric, (before, after), self.crowd.count);
        self.says.put(
            &format!("{metric}_server_rss_mib"),
            after.resident_kib as f64 / 1024.0,
            "MiB",
        );
        self.says.put(&format!("{metric}_server_descriptors"), after.descriptors as f64, "1");
        Ok(())
    }
}

async fn die(member: std::sync::Arc<GroupMember>, report: MemberReport) -> MemberReport {
    member.die();
    report
}
