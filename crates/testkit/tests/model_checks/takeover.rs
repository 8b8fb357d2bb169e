//! Two servers of one slice. They die, are cut off, hand the slice over, and take over from each other.

use std::ops::Range;

use dray_rpc::server::Sabotage;
use dray_testkit::simulator::{PairKind, WorkloadKind, run_failover, run_takeovers};

/// Seeds of each kind of work: with three pairs of servers and all kinds, some hundred runs.
const SEEDS: u64 = 9;

/// All seeds of each kind of work are well, and the slice has moved often.
fn are_well(pair: PairKind) {
    let (mut moves, mut runs) = (0, 0);
    for kind in pair.kinds() {
        for seed in 0..SEEDS {
            runs += 1;
            match run_takeovers(pair, kind, seed, None) {
                Ok(report) => moves += report.takeovers,
                Err(failure) if failure.is_undecided() => {}
                Err(failure) => panic!("{pair:?} {kind:?}: {failure}"),
            }
        }
    }
    // Short work may end before a server dies.
    assert!(2 * moves >= runs, "{pair:?}: the slice moved only {moves} times in {runs} runs");
}

// proves: P142, P143, P144
#[test]
fn nobody_notices_that_a_server_of_one_machine_takes_over() {
    are_well(PairKind::OneMachine);
}

// proves: P142, P144
#[test]
fn what_clients_keep_outlives_a_takeover_by_another_machine() {
    are_well(PairKind::TwoMachines);
}

// proves: P142
#[test]
fn what_clients_keep_outlives_the_loss_of_a_servers_machine() {
    are_well(PairKind::TwoMachinesLost);
}

/// Three servers with three slices: a death takes the primary of one and the backup of another. Three seeds of
/// each kind; `script/simulate --pair onemachine --servers 3` runs more.
// proves: P142, P143, P144
#[test]
fn nobody_notices_what_happens_among_three_servers() {
    let mut moves = 0;
    let kinds = WorkloadKind::ALL.into_iter().cycle().take(3 * WorkloadKind::ALL.len());
    for (seed, kind) in (100..).zip(kinds) {
        match run_failover(3, (PairKind::OneMachine, kind), seed, None) {
            Ok(report) => moves += report.takeovers,
            Err(failure) if failure.is_undecided() => {}
            Err(failure) => panic!("{kind:?}: {failure}"),
        }
    }
    assert!(moves >= 20, "the slices moved only {moves} times");
}

fn is_well(servers: usize, kind: WorkloadKind, seed: u64) {
    let ran = run_failover(servers, (PairKind::OneMachine, kind), seed, None);
    ran.unwrap_or_else(|failure| panic!("{failure}"));
}

/// The note that a session has locks was under way when its server died. The client had the lock, and the
/// successor gave it to another one.
// proves: P201
#[test]
fn a_lock_is_had_once_the_backup_knows_of_it() {
    for seed in [4, 30] {
        is_well(3, WorkloadKind::Counter, seed);
    }
}

/// A copy that an earlier primary had sent came to a new process of its successor, which lost all sessions.
// proves: P200
#[test]
fn a_copy_of_long_ago_replaces_no_journal() {
    is_well(3, WorkloadKind::Register, 18);
}

/// A replay had opened a file again when its server died. The client's next connection asked the next server
/// for the same, which has the file open for as long as the session lasts.
#[test]
fn a_replay_opens_no_file_at_the_server_after_the_one_that_it_is_for() {
    for (kind, seed) in
        [(WorkloadKind::Append, 39), (WorkloadKind::Believed, 93), (WorkloadKind::Believed, 142)]
    {
        let ran = run_takeovers(PairKind::TwoMachines, kind, seed, None);
        ran.unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// Some of these seeds, and one that is well, shows what is broken.
fn shows(what: Sabotage, (pair, kind): (PairKind, WorkloadKind), seeds: Range<u64>) {
    let shows = |seed: &u64| {
        let broken = run_takeovers(pair, kind, *seed, Some(what));
        broken.is_err() && run_takeovers(pair, kind, *seed, None).is_ok()
    };
    assert!(seeds.clone().any(|seed| shows(&seed)), "{what:?}: none of {seeds:?} shows it");
}

#[test]
fn a_change_that_is_made_before_the_backup_has_its_intent_is_noticed() {
    shows(Sabotage::Shipping, (PairKind::OneMachine, WorkloadKind::Append), 138..142);
}

// proves: P143
#[test]
fn a_server_that_answers_beyond_its_lease_is_noticed() {
    shows(Sabotage::ServingLease, (PairKind::OneMachine, WorkloadKind::Counter), 60..110);
}

#[test]
fn a_backup_that_is_said_to_be_in_step_too_early_is_noticed() {
    shows(Sabotage::InStep, (PairKind::TwoMachines, WorkloadKind::Append), 5..10);
}

// proves: P200
#[test]
fn a_backup_that_does_not_look_at_epochs_is_noticed() {
    shows(Sabotage::Epochs, (PairKind::OneMachine, WorkloadKind::Append), 30..60);
}

#[test]
fn a_copy_that_leaves_sessions_out_is_noticed() {
    shows(Sabotage::Copy, (PairKind::TwoMachines, WorkloadKind::Counter), 0..20);
}

/// A write had been answered by a server that died, and its client had not heard it. An older write that
/// another client sent again stood over it, and the answer to the client said that it had been made.
#[test]
fn an_answered_write_that_is_not_made_again_is_noticed() {
    shows(Sabotage::AnsweredData, (PairKind::TwoMachines, WorkloadKind::Counter), 20..50);
}

/// A client asked once more for a write that the server before had answered. It was made by its old stamp
/// behind a sync that had said that everything up to a later one is on media. The next loss took it, and
/// clients left it out.
// proves: P142
#[test]
fn a_sync_that_speaks_of_changes_still_asked_for_is_noticed() {
    shows(Sabotage::AwaitedStamps, (PairKind::TwoMachinesLost, WorkloadKind::Counter), 100..110);
}

/// A recovery had ended, and its server died before that was noted. The next recovery made older changes
/// again over newer ones.
// proves: P142
#[test]
fn a_recovery_that_goes_on_without_what_was_done_since_is_noticed() {
    shows(Sabotage::RepeatedRecovery, (PairKind::TwoMachines, WorkloadKind::Words), 1850..1851);
}

/// A server had made an answered change again for its client, and noted the answer once more, without the intent. The
/// next server restored that answer, and an older change of the client's replay stood over the change.
// proves: P102
#[test]
fn an_answered_change_is_made_again_by_each_server_that_follows() {
    for seed in [1946, 3502] {
        let ran = run_takeovers(PairKind::TwoMachines, WorkloadKind::Rights, seed, None);
        ran.unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// Two writes of one place came again: one that had been answered, and a later one that had been begun. The
/// later one was made first. And an answer of the server before came when the replay was over.
// proves: P142
#[test]
fn what_comes_again_after_a_loss_is_in_its_order_and_in_time() {
    for seed in [1889, 2334] {
        let ran = run_takeovers(PairKind::TwoMachinesLost, WorkloadKind::Register, seed, None);
        ran.unwrap_or_else(|failure| panic!("{failure}"));
    }
}
