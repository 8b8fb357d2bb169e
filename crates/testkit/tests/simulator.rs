//! Clients and a server, with everything going wrong.

use dray_rpc::server::Sabotage;
use dray_testkit::simulator::{
    WorkKind, run, run_cut_short, run_interleaved, run_leaving, run_of, run_power_loss,
    run_power_losses,
};

/// Seeds of the ordinary test; `script/simulate` runs more.
const SEEDS: u64 = 300;

#[test]
fn nothing_is_lost_or_done_twice_and_everything_is_given_back() {
    let (mut deaths, mut breaks) = (0, 0);
    for seed in 0..SEEDS {
        let report = run(seed, None).unwrap_or_else(|failure| panic!("{failure}"));
        deaths += report.deaths;
        breaks += report.breaks;
    }
    assert!(deaths > 1000 && breaks > 1000, "{deaths} deaths, {breaks} breaks: too fair a weather");
}

#[test]
fn a_seed_is_one_run() {
    for seed in 0..40 {
        let [one, other] = [(), ()].map(|()| run(seed, None));
        assert_eq!(one.ok(), other.ok(), "seed {seed}");
    }
}

/// A lock that was given back, with the answer lost, was claimed again from the next server,
/// and whoever had it by then lost it.
#[test]
fn what_was_given_back_is_not_claimed_again() {
    for seed in [729, 10_697, 17_655] {
        run_of(WorkKind::Counter, seed, None).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// The answer to the creation of a file that was answered again was misread where it had a
/// stamp, so that the file was not opened and could go before its client used it.
#[test]
fn what_was_opened_twice_over_a_death_is_kept_for_its_client() {
    for seed in [111_752, 118_577] {
        run_of(WorkKind::Model, seed, None).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// A copy that a death cut short was made again from a source that had been changed since,
/// after somebody had seen the first.
#[test]
fn a_copy_is_made_again_from_what_was_there() {
    let ran = run_cut_short(WorkKind::Copies, 4391, None);
    ran.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn clients_in_turn_agree_with_the_model_whatever_goes_wrong() {
    for seed in 0..150 {
        run_interleaved(seed).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn what_was_synced_survives_a_loss_of_power() {
    for seed in 0..100 {
        run_power_loss(seed).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn what_a_death_cuts_short_happens_once_and_before_all_others() {
    for (kind, seeds) in [(WorkKind::Words, 200), (WorkKind::Copies, 100), (WorkKind::Puts, 100)] {
        for seed in 0..seeds {
            let ran = run_cut_short(kind, seed, None);
            ran.unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}

/// With a protection left out, some seed must show it in each of these kinds of work:
/// whatever notices it, a check of the simulator or an assertion of the code.
fn must_fail(sabotage: Sabotage, kinds: &[WorkKind]) {
    for &kind in kinds {
        let passes = |seed| {
            let ran = std::panic::catch_unwind(|| match sabotage {
                Sabotage::Turns => run_cut_short(kind, seed, Some(sabotage)),
                _ => run_of(kind, seed, Some(sabotage)),
            });
            ran.is_ok_and(|run| run.is_ok())
        };
        assert!(!(0..SEEDS).all(passes), "{sabotage:?} was left out and {kind:?} did not notice");
    }
}

#[test]
fn a_server_without_its_reply_cache_is_found_out() {
    must_fail(
        Sabotage::ReplyCache,
        &[WorkKind::Names, WorkKind::Append, WorkKind::Puts, WorkKind::Copies],
    );
}

#[test]
fn a_server_without_intents_is_found_out() {
    must_fail(Sabotage::Intents, &[WorkKind::Names, WorkKind::Append]);
}

#[test]
fn a_server_that_reads_stale_connections_is_found_out() {
    must_fail(Sabotage::Fence, &[WorkKind::Words]);
}

#[test]
fn a_server_that_forgets_locks_is_found_out() {
    must_fail(Sabotage::Reclaim, &[WorkKind::Counter]);
}

#[test]
fn a_server_that_does_not_wait_for_what_lookups_opened_is_found_out() {
    must_fail(Sabotage::Ahead, &[WorkKind::Rights]);
}

#[test]
fn rights_that_are_taken_are_gone_whatever_goes_wrong() {
    for seed in 0..100 {
        run_of(WorkKind::Rights, seed, None).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn a_server_that_tells_wrong_versions_of_halves_is_found_out() {
    must_fail(Sabotage::Halves, &[WorkKind::Register]);
}

#[test]
fn a_server_that_lets_others_at_what_was_cut_short_is_found_out() {
    must_fail(Sabotage::Turns, &[WorkKind::Words, WorkKind::Copies, WorkKind::Puts]);
}

#[test]
fn a_server_that_does_not_keep_removed_files_for_who_returns_is_found_out() {
    must_fail(Sabotage::Custody, &[WorkKind::Deleted]);
}

/// Seeds with losses of power of the ordinary test.
const POWER_SEEDS: u64 = 300;

#[test]
fn what_was_kept_outlives_a_loss_of_power_and_what_was_not_is_told() {
    for seed in 0..POWER_SEEDS {
        run_power_losses(seed, None).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// As [`must_fail`], where the server's machine loses power.
fn must_fail_without_power(sabotage: Sabotage) {
    let passes = |seed| {
        std::panic::catch_unwind(|| run_power_losses(seed, Some(sabotage)))
            .is_ok_and(|run| run.is_ok())
    };
    assert!(!(0..POWER_SEEDS).all(passes), "{sabotage:?} was left out and nobody noticed");
}

#[test]
fn a_server_that_drops_what_is_sent_again_is_found_out() {
    must_fail_without_power(Sabotage::Redo);
}

#[test]
fn a_server_that_redoes_in_order_of_arrival_is_found_out() {
    must_fail_without_power(Sabotage::RedoOrder);
}

#[test]
fn a_server_that_does_new_work_before_the_old_is_found_out() {
    must_fail_without_power(Sabotage::RedoGate);
}

#[test]
fn a_server_that_undoes_what_was_synced_is_found_out() {
    must_fail_without_power(Sabotage::RedoFloor);
}

#[test]
fn a_server_that_forgets_locks_with_its_machine_is_found_out() {
    must_fail_without_power(Sabotage::Reclaim);
}

#[test]
fn what_was_written_before_an_unmount_is_synced_or_its_loss_told() {
    for seed in 0..POWER_SEEDS {
        run_leaving(seed, None).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn a_server_that_does_not_sync_for_who_leaves_is_found_out() {
    let passes = |seed| run_leaving(seed, Some(Sabotage::LastSync)).is_ok();
    assert!(!(0..20).all(passes), "it was left out and nobody noticed");
}
