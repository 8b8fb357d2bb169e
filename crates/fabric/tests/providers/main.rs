//! One suite for everything that carries frames: what a provider has to keep to.
//!
//! A provider passes it by one line below. `apart`: the accepted end is served by another thread.

mod lent;
mod rig;
mod sink;
mod suite;
mod within;

use rig::Rig;

/// All tests of the suite for one provider.
macro_rules! provider {
    ($name:ident: $rig:expr) => {
        provider!($name: $rig, [
            frames_arrive_in_their_order_both_ways,
            the_largest_frames_arrive_whole,
            what_is_out_of_bounds_is_refused_and_goes_nowhere,
            notices_that_wait_are_bounded_and_do_not_count_as_queued,
            without_memory_nothing_more_is_received,
            what_waits_for_memory_ends_with_its_connection,
            an_end_that_does_not_read_is_seen_and_keeps_no_memory,
            what_a_sender_needs_again_is_copied_and_arrives_whole,
            the_end_of_a_connection_wakes_both_ends,
            a_last_word_is_heard_before_the_end,
            what_is_received_is_counted_until_it_is_let_go,
            both_ends_know_who_is_there,
            the_first_head_is_looked_at_and_stays,
            a_first_head_that_never_comes_or_is_too_long_is_an_error,
            a_refused_peer_learns_of_it,
            other_threads_may_send,
            one_connection_leaves_others_their_tick,
        ]);
    };
    ($name:ident: $rig:expr, [$($test:ident),* $(,)?]) => {
        mod $name {
            use super::*;
            $(
                #[test]
                fn $test() {
                    $rig.run(suite::$test);
                }
            )*
        }
    };
}

provider!(tcp: Rig::tcp());
provider!(tcp_apart: Rig::tcp().apart());
provider!(unix: Rig::unix());
provider!(unix_apart: Rig::unix().apart());
provider!(local: Rig::local());
provider!(local_apart: Rig::local().apart());
provider!(local_simulated: Rig::local().simulated());
provider!(sim: Rig::sim());
