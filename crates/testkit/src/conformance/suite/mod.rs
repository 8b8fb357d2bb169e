//! Directed tests: each promise of the traits' documentation, once.

mod attributes;
mod data;
mod listing;
mod locks;
mod names;
mod place;

use std::sync::Arc;

use dray_core::FileSystem;

use place::TestDirectory;

/// What a file system has beyond what every one must have.
#[derive(Clone, Copy, Debug)]
pub struct OptionalFeatures {
    /// flock and fcntl locks.
    pub locks: bool,
    /// `user.` attributes.
    pub xattrs: bool,
    /// `FALLOC_FL_ZERO_RANGE`.
    pub zero_range: bool,
    /// `FALLOC_FL_COLLAPSE_RANGE` and `INSERT_RANGE`.
    pub shift_range: bool,
    /// The id of a removed file ends with its last close, and no later. Else a look at it that the file system makes
    /// by itself may end first.
    pub ids_end_at_once: bool,
}

impl OptionalFeatures {
    /// Everything.
    pub const ALL: OptionalFeatures = OptionalFeatures {
        locks: true,
        xattrs: true,
        zero_range: true,
        shift_range: true,
        ids_end_at_once: true,
    };
}

/// Runs every directed test on one store, seen through one or more `clients`: where there
/// are several, the tests speak to them in turn. Each test has a directory of its own.
///
/// Works on any file system whose root directory root may change; run it inside an
/// executor.
///
/// # Panics
/// At the first promise that is not kept, naming it.
pub async fn suite(clients: &[Arc<dyn FileSystem>], offers: OptionalFeatures) {
    suite_without(clients, offers, &[]).await;
}

/// The same without the tests that are named here (`data::ranges_are_copied`), for a store that cannot do what
/// they ask.
///
/// # Panics
/// As [`suite`] does, and if there is no test of such a name.
pub async fn suite_without(
    clients: &[Arc<dyn FileSystem>],
    offers: OptionalFeatures,
    left_out: &[&str],
) {
    assert!(!clients.is_empty(), "a suite needs a client");
    let mut unknown = left_out.to_vec();
    macro_rules! tests {
        ($($test:path),* $(,)?) => {
            $({
                let name = stringify!($test);
                unknown.retain(|one| *one != name);
                if !left_out.contains(&name) {
                    let place = TestDirectory::new(clients, name).await;
                    $test(&place).await;
                }
            })*
        };
    }
    tests![
        names::exclusive_create_has_one_winner,
        names::create_opens_what_is_there_unless_exclusive,
        names::the_mode_does_not_limit_the_first_open,
        names::names_that_end_badly_answer_as_linux_does,
        names::a_parent_is_found_and_the_root_is_its_own,
        names::rename_replaces_keeps_back_and_exchanges,
        names::a_directory_does_not_go_into_itself,
        names::links_count_and_outlive_each_other,
        names::an_unnamed_file_gets_its_first_name,
        data::reads_are_short_only_at_the_end,
        data::appends_of_two_open_files_do_not_mix,
        data::a_deleted_file_lives_while_it_is_open,
        data::rights_are_those_of_the_open,
        data::holes_and_data_are_distinguished,
        data::space_is_given_and_punched,
        data::ranges_are_copied,
        data::sync_and_flush_succeed,
        attributes::attributes_change_alone,
        attributes::a_write_clears_set_id_bits,
        attributes::permissions_are_checked,
        attributes::access_answers_for_the_caller,
        attributes::statfs_makes_sense,
        listing::a_listing_is_whole_and_goes_on_from_any_cookie,
        listing::a_listing_survives_changes,
    ];
    match offers.ids_end_at_once {
        true => tests![names::ids_survive_rename_and_die_with_the_file],
        false => tests![names::ids_survive_rename_and_die_soon_after_the_file],
    }
    if offers.zero_range {
        tests![data::zeroed_ranges_read_as_zeros];
    }
    if offers.shift_range {
        tests![data::ranges_are_cut_out_and_put_in];
    }
    if offers.xattrs {
        tests![attributes::xattrs_are_kept];
    }
    if offers.locks {
        tests![
            locks::exclusive_locks_exclude,
            locks::ranges_are_locked_apart,
            locks::a_waiting_lock_is_granted_and_can_be_interrupted,
            locks::locks_end_with_flush_and_close,
        ];
    }
    assert!(unknown.is_empty(), "no tests have these names: {unknown:?}");
}
