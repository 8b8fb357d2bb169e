//! The effect of an observer, and of a greedy client, on the other clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dray_core::{BufMut, Context, FileSystem, OpenHow, Write};
use dray_rt::spawn_join;

use super::Many;
use super::crowd::{Bystanders, ClientGroup, GroupMember, MemberReport};
use super::restarts::make;
use crate::CommandResult;

/// Clients whose calls are timed.
const BYSTANDERS: usize = 32;
/// How long each is watched.
const TIME: Duration = Duration::from_secs(3);
/// Sessions of one who wants too much, and calls under way in each.
const GREEDY: usize = 16;
const CALLS: usize = 128;
/// Names in the directory that is listed all the time.
const NAMES: usize = 20_000;

impl Many {
    /// How long the status takes, how long it is, and what it does to others.
    pub(super) fn status(&mut self) -> CommandResult {
        let mut bystanders = Bystanders::new(&self.plan, BYSTANDERS)?;
        bystanders.begin();
        std::thread::sleep(TIME / 2);
        self.says.spread_ms("status_before_others", &bystanders.end().steps());
        bystanders.begin();
        let before = self.server.look();
        let at_once = ["--interval", "0", "--json"];
        for (name, options) in [("text", &at_once[..2]), ("json", &at_once)] {
            let (text, took) = self.ask_status(options)?;
            self.says.put(&format!("status_{name}_ms"), took * 1e3, "ms");
            self.says.put(&format!("status_{name}_bytes"), text.len() as f64, "B");
            self.says.put(&format!("status_{name}_lines"), text.lines().count() as f64, "1");
        }
        self.says.server("status", (before, self.server.look()), 2);
        let (_, took) = self.ask_status(&["--interval", "0.1"])?;
        self.says.put("status_rates_ms", took * 1e3, "ms");
        self.says.spread_ms("status_others", &bystanders.end().steps());
        Ok(())
    }

    /// One client of many wants as much as it can get.
    pub(super) fn rogues(&mut self) -> CommandResult {
        let mut bystanders = Bystanders::new(&self.plan, BYSTANDERS)?;
        let mut greedy = ClientGroup::new(&self.plan, 1, 70_000)?;
        greedy.connect(GREEDY);
        for (name, how) in [("large", Greed::Large), ("listing", Greed::Listing)] {
            greedy.begin(0..GREEDY, move |member, report| prepare(member, report, how)).wait();
            let on = Arc::new(AtomicBool::new(true));
            let goes_on = on.clone();
            let running = greedy.begin(0..GREEDY, move |member, report| {
                insist(member, report, how, goes_on.clone())
            });
            bystanders.begin();
            std::thread::sleep(TIME);
            let seen = bystanders.end();
            on.store(false, Ordering::SeqCst);
            let insisted = running.wait();
            self.says.put(&format!("rogue_{name}_calls"), insisted.steps().count() as f64, "1");
            self.says.spread_ms(&format!("rogue_{name}_others"), &seen.steps());
            self.says.failures(&format!("rogue_{name}_others"), &seen);
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
enum Greed {
    Large,
    Listing,
}

async fn prepare(member: Arc<GroupMember>, mut report: MemberReport, how: Greed) -> MemberReport {
    for file in member.give_up_files() {
        report.step(file.close(&Context::system())).await;
    }
    let file = match how {
        Greed::Large => {
            let file = report.step(make(&member, &format!("large{}", member.number))).await;
            if let Some(file) = &file {
                let data = dray_core::Buf::from(&vec![7; 1 << 20][..]);
                report.step(file.write(&Context::system(), Write::at(0), data)).await;
            }
            file
        }
        Greed::Listing => {
            for number in (0..NAMES / GREEDY).map(|number| number * GREEDY + member.number) {
                let made = make(&member, &format!("a-name-to-be-listed-{number}")).await;
                if let Ok(made) = made {
                    let _ = made.close(&Context::system()).await; // it is not what is measured
                }
            }
            let (cx, root) = (Context::system(), member.fs.info().root);
            report.step(member.fs.open(&cx, root, OpenHow::DIRECTORY)).await
        }
    };
    file.into_iter().for_each(|file| member.keep(file));
    report
}

/// So many calls at once, again and again.
async fn insist(
    member: Arc<GroupMember>,
    mut report: MemberReport,
    how: Greed,
    on: Arc<AtomicBool>,
) -> MemberReport {
    let Some(file) = member.files().first().cloned() else { return report };
    let calls: Vec<_> = (0..CALLS)
        .map(|_| {
            let (file, on) = (file.clone(), on.clone());
            spawn_join(async move {
                let (cx, mut calls) = (Context::system(), MemberReport::default());
                while on.load(Ordering::SeqCst) {
                    match how {
                        Greed::Large => {
                            let read = async {
                                let read = file.read(&cx, 0, BufMut::heap(1 << 20)).await;
                                read.map_err(|(error, _)| error)
                            };
                            calls.step(read).await;
                        }
                        Greed::Listing => {
                            calls.step(file.readdir(&cx, 0, 1 << 20, true)).await;
                        }
                    }
                }
                calls
            })
        })
        .collect();
    for call in calls {
        report.steps.extend(call.await.unwrap_or_default().steps);
    }
    report
}
