//! A file that was opened ahead gives nobody a right that has been taken away.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use dray_core::{Errno, FileId, FileSystem, Gid, Name, OpenHow, SetAttr, Uid, XattrSet};
use dray_fabric::sim::Network;
use dray_rpc::server::Sabotage;
use dray_rt::{Scope, now, sleep};

use super::program::{A_WHILE, FILE, Program, READ, learned};
use crate::common::simulate;

#[test]
fn what_was_opened_for_one_user_is_not_anothers() {
    simulate(17, async {
        let network = Network::new();
        let (_server, _server_process, program, id) = learned(&network, None).await;
        let set = SetAttr { mode: Some(0o600), uid: Some(Uid(1001)), ..SetAttr::default() };
        program.fs.setattr(&program.cx_of(0), id, set).await.unwrap();
        program.lookup(FILE).await.unwrap();
        assert_eq!(program.made(), 1);
        let other = program.fs.open(&program.cx_of(1002), id, READ).await;
        assert_eq!(other.err().expect("it may not").errno(), Errno::EACCES);
    });
}

/// The change that takes rights away: a new mode, or a new owner as well.
#[derive(Clone, Copy, Debug)]
enum Taking {
    Mode,
    Owner,
}

impl Taking {
    async fn take(self, by: &Program, id: FileId) {
        let cx = by.cx_of(0);
        match self {
            Taking::Mode => by.chmod(id, 0o600).await,
            Taking::Owner => {
                let set = SetAttr { mode: Some(0o600), uid: Some(Uid(5)), ..SetAttr::default() };
                by.fs.setattr(&cx, id, set).await.unwrap();
            }
        }
    }
}

/// Another client takes a program's right to a file away, and then notifies the program. Answers
/// whether the program, which looked the file up before, can still open it.
async fn opened_without_right(seed: u64, sabotage: Option<Sabotage>, taking: Taking) -> bool {
    let network = Network::new();
    let (_server, _server_process, program, id) = learned(&network, sabotage).await;
    let other = Program::mount(&network, 8).await;
    sleep(Duration::from_micros(seed * 37 % 1000)).await;
    let id = program.lookup(FILE).await.map_or(id, |entry| entry.id);
    taking.take(&other, id).await;
    match program.open(id, READ).await {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.errno(), Errno::EACCES);
            false
        }
    }
}

// proves: P14
#[test]
fn a_right_that_another_client_took_away_is_gone() {
    for taking in [Taking::Mode, Taking::Owner] {
        for seed in 0..50 {
            let opened = simulate(seed, opened_without_right(seed, None, taking));
            assert!(!opened, "seed {seed}: {taking:?}");
        }
    }
}

/// The changes that another client makes to the file, and whether they can take a right away.
const CHANGES: [(&str, bool); 8] = [
    ("mode", true),
    ("owner", true),
    ("list", true),
    ("no list", true),
    ("label", true),
    ("flags", true),
    ("note", false),
    ("size", false),
];

/// Whether the file system below has such a thing does not matter: it is waited for before it is
/// asked.
async fn change(what: &str, by: &Program, id: FileId) {
    const LIST: &[u8] = b"system.posix_acl_access";
    let (cx, set) = (by.cx_of(0), SetAttr::default());
    let file = by.fs.open(&cx, id, OpenHow::READ_WRITE).await.unwrap();
    let setxattr = |name| by.fs.setxattr(&cx, id, name, b"value", XattrSet::Any);
    let _ = match what {
        "mode" => by.fs.setattr(&cx, id, SetAttr { mode: Some(0o666), ..set }).await.map(drop),
        "owner" => by.fs.setattr(&cx, id, SetAttr { gid: Some(Gid(5)), ..set }).await.map(drop),
        "list" => setxattr(LIST).await,
        "no list" => by.fs.removexattr(&cx, id, LIST).await,
        "label" => setxattr(b"security.selinux").await,
        "flags" => file.set_flags(&cx, 0).await,
        "note" => setxattr(b"user.note").await,
        _ => by.fs.setattr(&cx, id, SetAttr { size: Some(5), ..set }).await.map(drop),
    };
    file.close(&cx).await.unwrap();
}

// proves: P14
#[test]
fn whatever_can_take_a_right_away_waits_and_nothing_else_does() {
    for (what, waits) in CHANGES {
        simulate(18, async {
            let network = Network::new();
            let (_server, _server_process, program, id) = learned(&network, None).await;
            let other = Program::mount(&network, 8).await;
            program.lookup(FILE).await.unwrap();
            assert_eq!(program.made(), 1, "nothing was opened ahead");
            let begin = now();
            change(what, &other, id).await;
            let waited = begin.elapsed();
            assert_eq!(waited >= Duration::from_millis(4), waits, "{what}: {waited:?}");
        });
    }
}

/// The server waits for what was opened ahead so long that this is over by then.
// proves: P14
#[test]
fn what_was_opened_is_used_for_a_moment_only() {
    simulate(5, async {
        let network = Network::new();
        let (_server, _server_process, program, id) = learned(&network, None).await;
        for (rests_us, asks) in [(500, 0), (2_100, 1)] {
            program.open_close(FILE, READ).await;
            // Until a lookup opens the file, and its answer is not delayed.
            loop {
                let (asked, made) = (now(), program.made());
                program.lookup(FILE).await.unwrap();
                if program.made() > made && asked.elapsed() < Duration::from_millis(1) {
                    break;
                }
                program.open(id, READ).await.unwrap().close(&program.cx()).await.unwrap();
            }
            sleep(Duration::from_micros(rests_us)).await;
            let before = program.round_trips();
            let file = program.open(id, READ).await.unwrap();
            assert_eq!(program.round_trips() - before, asks, "{rests_us} us after the lookup");
            file.close(&program.cx()).await.unwrap();
        }
    });
}

// proves: P14
#[test]
fn a_server_that_does_not_wait_for_what_is_open_is_found_out() {
    let opened =
        |seed| simulate(seed, opened_without_right(seed, Some(Sabotage::OpenAhead), Taking::Mode));
    assert!((0..50).any(opened), "the wait was left out, and nobody noticed");
}

/// The server lets a client's own changes pass: the client knows of them.
// proves: P14
#[test]
fn a_right_that_the_same_client_took_away_is_gone_at_once() {
    let mut waited = Duration::ZERO;
    for seed in 0..50 {
        waited += simulate(seed, async {
            let network = Network::new();
            let (_server, _server_process, program, id) = learned(&network, None).await;
            let other = Program::on(program.fs.clone(), 9);
            program.lookup(FILE).await.unwrap();
            let before = now();
            other.chmod(id, 0o600).await;
            let waited = before.elapsed();
            let error = program.open(id, READ).await.err().expect("it may not");
            assert_eq!(error.errno(), Errno::EACCES);
            waited
        });
    }
    assert!(waited < 50 * Duration::from_millis(4), "nobody has to be waited for: {waited:?}");
}

/// A change that is on its way when the file is looked up counts, too.
// proves: P14
#[test]
fn a_change_under_way_keeps_lookups_from_opening() {
    for seed in 0..200 {
        simulate(seed, async {
            let network = Network::new();
            let (_server, _server_process, program, id) = learned(&network, None).await;
            let other = Rc::new(Program::mount(&network, 8).await);
            let (taken, looked) = (Cell::new(false), program.lookup(FILE));
            let mut change = std::pin::pin!(async {
                other.chmod(id, 0o600).await;
                taken.set(true);
            });
            let mut work = std::pin::pin!(async {
                looked.await.unwrap();
                loop {
                    let gone = taken.get();
                    match program.open(id, READ).await {
                        Ok(_) if gone => panic!("seed {seed}: opened without the right"),
                        Ok(file) => drop(file),
                        Err(_) => break,
                    }
                    program.lookup(FILE).await.unwrap();
                }
            });
            let mut changed = false;
            std::future::poll_fn(|task| {
                changed = changed || change.as_mut().poll(task).is_ready();
                work.as_mut().poll(task)
            })
            .await;
        });
    }
}

/// A client that opens a file repeatedly must not delay a change of it for ever.
// proves: P14
#[test]
fn a_change_of_rights_waits_for_a_moment_only() {
    simulate(12, async {
        let network = Network::new();
        let (_server, _server_process, program, id) = learned(&network, None).await;
        let other = Program::mount(&network, 8).await;
        let scope = Scope::new();
        scope.spawn_on(&dray_rt::ExecutorHandle::current(), {
            let program = Program::on(program.fs.clone(), 10);
            let (fs, cx, root) = (program.fs.clone(), program.cx_of(0), program.root());
            async move {
                loop {
                    let entry = fs.lookup(&cx, root, Name::new(FILE).unwrap()).await.unwrap();
                    drop(fs.open(&cx, entry.id, READ).await.unwrap());
                }
            }
        });
        sleep(A_WHILE).await;
        let before = now();
        other.chmod(id, 0o600).await;
        let took = before.elapsed();
        assert!(took < Duration::from_millis(20), "{took:?}");
        scope.kill();
    });
}
