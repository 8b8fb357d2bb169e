//! A membership over a real etcd on loopback.

use std::sync::Arc;
use std::time::Duration;

use dray_cluster::{EtcdMembership, EtcdOptions};
use dray_rpc::server::{Membership, PageCacheId, Revision, ServerNumber, SliceChange, SliceState};
use dray_rt::{DriverKind, Executor, now, sleep, timeout};
use dray_testkit::etcd::Etcd;
use tempfile::TempDir;

/// For ever.
const EVER: Duration = Duration::from_secs(60);
const SLICE: &str = "x/0.1";
const ZERO: ServerNumber = ServerNumber(0);
const ONE: ServerNumber = ServerNumber(1);

fn options(urls: &[&str], me: ServerNumber) -> EtcdOptions {
    EtcdOptions {
        etcd: urls.iter().map(|url| (*url).to_owned()).collect(),
        ttl: Duration::from_secs(2),
        projection: "x".into(),
        fingerprint: 7,
        definition: "[projection.x]".into(),
        me,
        server: format!("tcp://io{}:7440", me.0),
        holder: format!("machine:/state/{}", me.0),
    }
}

/// Runs a test with an etcd, unless there is none here.
fn with_etcd<F: Future<Output = ()>>(test: impl FnOnce(Etcd) -> F) {
    let dir = TempDir::new().unwrap();
    let Some(etcd) = Etcd::start(dir.path()) else { return };
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        timeout(3 * EVER, test(etcd)).await.expect("the test ends");
    });
}

async fn joined(etcd: &Etcd, me: ServerNumber) -> EtcdMembership {
    member(options(&[&etcd.url()], me)).await
}

async fn member(options: EtcdOptions) -> EtcdMembership {
    let member = EtcdMembership::start(options).unwrap();
    let joined = timeout(EVER, member.joined()).await;
    joined.unwrap_or_else(|_| panic!("etcd does not answer: {:?}", member.view().trouble)).unwrap();
    member
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = now();
    while !done() {
        assert!(begun.elapsed() < EVER, "waited in vain: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn state(primary: ServerNumber, epoch: u64) -> SliceState {
    let page_cache = PageCacheId(7);
    SliceState { primary, epoch, in_step: false, loss: 1, recovering: false, page_cache }
}

fn from(seen: Option<Revision>, next: SliceState) -> SliceChange {
    SliceChange { seen, gone: None, next }
}

/// Asks again while etcd is out of reach.
async fn slice(member: &EtcdMembership) -> Option<(SliceState, Revision)> {
    let begun = now();
    loop {
        match member.slice(SLICE).await {
            Ok(slice) => return slice,
            Err(error) => assert!(begun.elapsed() < EVER, "{error}"),
        }
    }
}

#[test]
fn a_server_that_dies_is_gone_when_its_lease_ends_and_no_answer_of_it_is_later() {
    with_etcd(|etcd| async move {
        let (zero, one) = (joined(&etcd, ZERO).await, joined(&etcd, ONE).await);
        until("both know of both", || {
            [&zero, &one].iter().all(|each| each.is_member(ZERO) && each.is_member(ONE))
        })
        .await;
        assert!(zero.change(SLICE, from(None, state(ZERO, 1))).await.unwrap());
        let (_, revision) = slice(&one).await.unwrap();
        let take_over = SliceChange { seen: Some(revision), gone: Some(ZERO), next: state(ONE, 2) };
        assert!(!one.change(SLICE, take_over).await.unwrap(), "it is still there");
        let lease = zero.lease();
        assert!(lease.holds());
        let dies = now();
        drop(zero);
        until("the watch hears of the end", || !one.is_member(ZERO)).await;
        println!("gone after {:?}", dies.elapsed());
        assert!(!lease.holds(), "it could still have answered");
        assert!(one.change(SLICE, take_over).await.unwrap());
        assert_eq!(slice(&one).await.unwrap().0, state(ONE, 2));
        assert!(one.lease().holds());
    });
}

#[test]
fn of_changes_that_race_one_is_made() {
    with_etcd(|etcd| async move {
        let members = [joined(&etcd, ZERO).await, joined(&etcd, ONE).await].map(Arc::new);
        for epoch in 0..20 {
            let seen = slice(&members[0]).await.map(|(_, revision)| revision);
            let races = members.iter().chain(&members).map(|member| {
                let (member, next) = (member.clone(), state(member.me(), epoch));
                dray_rt::spawn_join(async move { member.change(SLICE, from(seen, next)).await })
            });
            let mut made = 0;
            for race in races.collect::<Vec<_>>() {
                made += usize::from(race.await.unwrap().unwrap());
            }
            assert_eq!(made, 1, "epoch {epoch}");
            assert_eq!(slice(&members[0]).await.unwrap().0.epoch, epoch, "its own change is seen");
            until("the other one hears", || {
                members[1].view().slices.get(SLICE).is_some_and(|(now, _)| now.epoch == epoch)
            })
            .await;
        }
    });
}

#[test]
fn while_etcd_stands_still_nobody_answers_and_what_was_asked_for_is_not_done_later() {
    with_etcd(|etcd| async move {
        let zero = joined(&etcd, ZERO).await;
        assert!(zero.change(SLICE, from(None, state(ZERO, 1))).await.unwrap());
        let (_, before) = slice(&zero).await.unwrap();
        etcd.stop();
        until("the lease lapses", || !zero.lease().holds()).await;
        until("it is said", || zero.view().trouble.is_some()).await;
        let asked = zero.change(SLICE, from(Some(before), state(ZERO, 2))).await;
        assert!(asked.is_err(), "nobody can have answered");
        etcd.go_on();
        until("it is a member again", || zero.lease().holds()).await;
        let (now, revision) = slice(&zero).await.unwrap();
        assert_ne!(revision, before, "the change could still be made");
        assert!(zero.change(SLICE, from(Some(revision), state(ZERO, 3))).await.unwrap());
        assert!(now.epoch == 1 || now.epoch == 2);
        assert_eq!(slice(&zero).await.unwrap().0.epoch, 3);
        assert_eq!(zero.view().trouble, None);
    });
}

#[test]
fn an_etcd_that_restarts_knows_its_members() {
    with_etcd(|mut etcd| async move {
        let (zero, one) = (joined(&etcd, ZERO).await, joined(&etcd, ONE).await);
        etcd.restart();
        for member in [&zero, &one] {
            until("in touch again", || member.view().etcd.is_some() && member.lease().holds())
                .await;
        }
        assert!(zero.change(SLICE, from(None, state(ZERO, 1))).await.unwrap());
        until("the other one hears", || one.view().slices.contains_key(SLICE)).await;
    });
}

#[test]
fn who_is_first_waits_for_etcd_and_says_so() {
    with_etcd(|mut etcd| async move {
        etcd.kill();
        let zero = EtcdMembership::start(options(&[&etcd.url()], ZERO)).unwrap();
        until("it is said", || zero.view().trouble.is_some()).await;
        assert!(!zero.lease().holds());
        assert!(timeout(Duration::from_millis(1), zero.joined()).await.is_err());
        etcd.restart();
        timeout(EVER, zero.joined()).await.unwrap().unwrap();
        assert!(zero.is_member(ZERO) && zero.lease().holds());
    });
}

#[test]
fn a_member_of_etcd_that_is_away_is_left_out() {
    with_etcd(|etcd| async move {
        // Nobody listens at the first one.
        let away = etcd.url().replace("http://127.", "http://127.1");
        let zero = member(options(&[&away, &etcd.url()], ZERO)).await;
        assert_eq!(zero.view().etcd, Some(etcd.url()));
        assert!(zero.lease().holds());
    });
}

// proves: P146
#[test]
fn another_definition_counts_once_all_servers_of_the_former_one_are_gone() {
    with_etcd(|etcd| async move {
        let zero = joined(&etcd, ZERO).await;
        assert!(zero.change(SLICE, from(None, state(ZERO, 1))).await.unwrap());
        let other = EtcdOptions { fingerprint: 8, ..options(&[&etcd.url()], ONE) };
        let one = EtcdMembership::start(other.clone()).unwrap();
        let refusal = timeout(EVER, one.joined()).await.unwrap().unwrap_err().to_string();
        for words in ["0000000000000007", "0000000000000008", "tcp://io0:7440", "`x`"] {
            assert!(refusal.contains(words), "{refusal}");
        }
        assert!(!one.lease().holds() && !one.is_member(ONE));
        drop(one);
        zero.leave().await.unwrap();
        let one = member(other).await;
        assert_eq!(slice(&one).await, None, "numbers of servers mean other servers now");
    });
}

#[test]
fn a_process_takes_the_place_of_the_one_before_it_and_of_nobody_else() {
    with_etcd(|etcd| async move {
        let first = joined(&etcd, ZERO).await;
        let other =
            EtcdOptions { holder: "elsewhere:/state".into(), ..options(&[&etcd.url()], ZERO) };
        let other = EtcdMembership::start(other).unwrap();
        let waits = || other.view().trouble.is_some_and(|why| why.contains("machine:/state/0"));
        until("it says for whom it waits", waits).await;
        let lease = first.lease();
        drop(first);
        let again = joined(&etcd, ZERO).await;
        assert!(again.lease().holds() && !other.lease().holds());
        drop(again);
        timeout(EVER, other.joined()).await.unwrap().unwrap();
        assert!(!lease.holds());
    });
}

#[test]
fn who_leaves_is_gone_at_once() {
    with_etcd(|etcd| async move {
        let ttl = Duration::from_secs(60);
        let (zero, one) = (
            member(EtcdOptions { ttl, ..options(&[&etcd.url()], ZERO) }).await,
            joined(&etcd, ONE).await,
        );
        until("they know of each other", || one.is_member(ZERO)).await;
        let begun = now();
        zero.leave().await.unwrap();
        assert!(!zero.lease().holds());
        until("it is gone", || !one.is_member(ZERO)).await;
        assert!(begun.elapsed() < ttl, "the lease ended by itself");
        assert!(zero.slice(SLICE).await.is_err());
    });
}

#[test]
fn marks_of_administrators_are_heard_everywhere_and_a_drain_ends_with_the_process() {
    with_etcd(|etcd| async move {
        let (zero, one) = (joined(&etcd, ZERO).await, joined(&etcd, ONE).await);
        let mut seen = 0;
        one.news(&mut seen).await;
        zero.set_quiesced(true).await.unwrap();
        while one.view().quiesced.is_none_or(|(mark, _)| mark.by != "tcp://io0:7440") {
            timeout(EVER, one.news(&mut seen)).await.expect("news of it");
        }
        one.set_quiesced(false).await.unwrap();
        until("it is heard", || zero.view().quiesced.is_none()).await;

        assert!(one.set_drained(ServerNumber(2), true).await.is_err(), "it is not there");
        one.set_drained(ZERO, true).await.unwrap();
        until("it is heard", || one.is_drained(ZERO) && zero.is_drained(ZERO)).await;
        drop(zero);
        let zero = joined(&etcd, ZERO).await;
        until("a new process is not drained", || !one.is_drained(ZERO)).await;
        zero.set_drained(ZERO, true).await.unwrap();
        until("it is heard", || one.is_drained(ZERO)).await;
        zero.set_drained(ZERO, false).await.unwrap();
        until("it is heard", || !one.is_drained(ZERO)).await;
    });
}
