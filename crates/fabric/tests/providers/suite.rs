//! What every provider has to keep to.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::Buf;
use dray_fabric::{
    BufferPool, Connection, DATA_MAX_BYTES, FIRST_HEAD_MAX_BYTES, HEAD_MAX_BYTES, NOTICES_MAX, Peer,
};
use dray_rt::{spawn, timeout, yield_now};

use crate::lent::{content, lent};
use crate::rig::{Provider, a_while, patiently, until};
use crate::sink::{Frame, Log, RefusingSink, Slow};

const MIB: usize = 1 << 20;
/// Frames of 1 MiB that no network takes without a reader.
const TOO_MANY: usize = 64;

/// Sends `data` until some of it waits for the other end; answers how often.
fn fill(connection: &dyn Connection, data: &Buf) -> usize {
    for sent in 0..TOO_MANY {
        // One frame may be with the receiver, which cannot take it.
        if connection.queued_frames() > 1 {
            return sent;
        }
        connection.send(&sent.to_le_bytes(), Some(data.clone())).unwrap();
    }
    panic!("it takes everything, and nobody reads");
}

fn numbers(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|number| number.to_le_bytes().to_vec()).collect()
}

fn is(frame: &Frame, head: &[u8], data: &[u8]) -> bool {
    frame.0 == head && frame.1.as_deref().unwrap_or_default() == data
}

pub async fn frames_arrive_in_their_order_both_ways(provider: Provider) {
    const FRAMES: usize = 300;
    let sizes = [0, 1, 0, 0, 4095, 70_000, 0, 300_000, 17];
    let whole = content(400_000, 0);
    let ends = provider.running(None).await;
    for number in 0..FRAMES {
        for (side, (end, _)) in ends.iter().enumerate() {
            let bytes = sizes[(number + side) % sizes.len()];
            let data = (bytes > 0).then(|| Buf::from(&whole[number..number + bytes]));
            end.send(&number.to_le_bytes(), data).unwrap();
        }
        if number % 40 == 0 {
            yield_now().await;
        }
    }
    for (side, (_, log)) in ends.iter().enumerate() {
        until("everything is there", || log.count() == FRAMES).await;
        for (number, frame) in log.lock().frames.iter().enumerate() {
            let bytes = sizes[(number + 1 - side) % sizes.len()];
            let data = &whole[number..number + bytes];
            assert!(is(frame, &number.to_le_bytes(), data), "frame {number}");
        }
    }
    until("nothing waits", || ends.iter().all(|(end, _)| end.queued_frames() == 0)).await;
}

pub async fn the_largest_frames_arrive_whole(provider: Provider) {
    let ends = provider.running(None).await;
    let (head, data) = (content(HEAD_MAX_BYTES, 1), content(DATA_MAX_BYTES, 2));
    for (from, to) in [(0, 1), (1, 0)] {
        ends[from].0.send(&head, Some(Buf::from(&data[..]))).unwrap();
        ends[from].0.send(&head, None).unwrap();
        until("both are there", || ends[to].1.count() == 2).await;
        let frames = &ends[to].1.lock().frames;
        assert!(is(&frames[0], &head, &data) && is(&frames[1], &head, b""));
    }
}

pub async fn what_is_out_of_bounds_is_refused_and_goes_nowhere(provider: Provider) {
    let [(near, _), (_, far_log)] = provider.running(None).await;
    let long = vec![0; DATA_MAX_BYTES + 1];
    let refused = [
        near.send(b"", None),
        near.send(&long[..=HEAD_MAX_BYTES], None),
        near.send(b"head", Some(Buf::from(&long[..]))),
        near.notify(b""),
        near.notify(&long[..=HEAD_MAX_BYTES]),
    ];
    for error in refused {
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
    }
    near.send(b"empty", Some(Buf::default())).unwrap();
    near.notify(b"next").unwrap();
    until("what is sound is there", || far_log.count() == 2).await;
    assert_eq!(far_log.heads(), [&b"empty"[..], b"next"]);
    assert!(far_log.lock().frames.iter().all(|(_, data)| data.is_none()));
}

pub async fn notices_that_wait_are_bounded_and_do_not_count_as_queued(provider: Provider) {
    let [(near, _), (_, far_log)] = provider.running(None).await;
    far_log.hold_up(true);
    let sent = fill(&*near, &Buf::from(vec![7; MIB]));
    a_while().await; // what can go has gone
    let queued = near.queued_frames();
    assert!(queued > 0, "it takes everything");
    for _ in 0..NOTICES_MAX {
        near.notify(b"notice").unwrap();
    }
    let refused = near.notify(b"notice").unwrap_err();
    assert_eq!((refused.kind(), near.queued_frames()), (io::ErrorKind::WouldBlock, queued));
    far_log.hold_up(false);
    until("all are there", || far_log.count() == sent + NOTICES_MAX).await;
    near.notify(b"notice").unwrap();
    until("one more is", || far_log.count() == sent + NOTICES_MAX + 1).await;
}

pub async fn without_memory_nothing_more_is_received(provider: Provider) {
    let [(near, _), (_, far_log)] = provider.running(None).await;
    far_log.hold_up(true);
    let data = content(MIB, 3);
    let sent = fill(&*near, &Buf::from(&data[..]));
    until("it is asked for memory", || far_log.lock().in_vain > 0).await;
    a_while().await;
    assert!(near.queued_frames() > 0 && far_log.count() == 0);
    let outgoing = near.unfinished().outgoing;
    assert_eq!(outgoing.is_some(), provider.can_stall());
    far_log.hold_up(false);
    until("all are there", || far_log.count() == sent).await;
    assert_eq!(far_log.heads(), numbers(sent));
    assert!(far_log.lock().frames.iter().all(|frame| frame.1.as_deref() == Some(&data[..])));
    until("nothing waits", || near.queued_frames() == 0).await;
    until("all is sent", || near.unfinished().outgoing.is_none()).await;
}

pub async fn what_waits_for_memory_ends_with_its_connection(provider: Provider) {
    let [(near, near_log), (far, far_log)] = provider.running(None).await;
    far_log.hold_up(true);
    near.send(b"head", Some(Buf::from(vec![7; 1000]))).unwrap();
    until("it is asked for memory", || far_log.lock().in_vain > 0).await;
    far.close();
    if provider.can_stall() {
        until("it ends", || far_log.has_ended()).await;
    }
    until("the other end learns of it", || near_log.has_ended()).await;
    assert_eq!(far_log.count(), 0);
}

/// As a client that was stopped, or whose threads hang.
pub async fn an_end_that_does_not_read_is_seen_and_keeps_no_memory(provider: Provider) {
    let (near, _far) = provider.pair().await;
    let near_log = Log::default();
    spawn(near_log.clone().run(near.clone(), None));
    let (data, in_use) = lent(vec![7; MIB]);
    fill(&*near, &data);
    drop(data);
    a_while().await;
    let first = near.unfinished();
    a_while().await;
    assert_eq!(near.unfinished(), first, "it moves, and nobody reads");
    assert_eq!(first.outgoing.is_some(), provider.can_stall());
    assert!(in_use.load(Ordering::SeqCst));
    near.close();
    until("it ends", || near_log.has_ended()).await;
    until("its memory is back", || !in_use.load(Ordering::SeqCst)).await;
    assert_eq!((near.queued_frames(), near.unfinished().outgoing), (0, None));
    assert!(near.send(b"head", None).is_err());
}

/// Of a process that was killed while the other end does not read: what it wrote would keep it
/// from ending.
pub async fn what_a_sender_needs_again_is_copied_and_arrives_whole(provider: Provider) {
    let (near, far) = provider.pair().await;
    spawn(Log::default().run(near.clone(), None));
    let whole = content(MIB, 5);
    let (data, in_use) = lent(whole.clone());
    let sent = fill(&*near, &data);
    a_while().await;
    near.let_go(&data);
    drop(data);
    assert_eq!(in_use.load(Ordering::SeqCst), !provider.can_stall());
    let far_log = Log::default();
    provider.spawn_far(far_log.clone().run(far, None));
    until("all are there", || far_log.count() == sent).await;
    for (number, frame) in far_log.lock().frames.iter().enumerate() {
        assert!(is(frame, &number.to_le_bytes(), &whole), "frame {number}");
    }
}

pub async fn the_end_of_a_connection_wakes_both_ends(provider: Provider) {
    for closer in [0, 1] {
        let ends = provider.running(None).await;
        a_while().await; // both are at rest
        ends[closer].0.close();
        for (end, log) in &ends {
            until("it ends", || log.has_ended()).await;
            assert!(end.send(b"head", None).is_err() && end.notify(b"head").is_err());
        }
    }
    // The near end does not say so: it is only let go.
    let (near, far) = provider.pair().await;
    let near_log = Log::default();
    spawn(near_log.clone().run(near.clone(), None));
    near.send(b"head", None).unwrap();
    provider.spawn_far(async move { drop(far) });
    until("it ends", || near_log.has_ended()).await;
}

pub async fn a_last_word_is_heard_before_the_end(provider: Provider) {
    let (near, far) = provider.pair().await;
    let near_log = Log::default();
    spawn(near_log.clone().run(near.clone(), None));
    let refused = Arc::new(Mutex::new(None));
    let why = refused.clone();
    provider.spawn_far(async move {
        let mut sink = RefusingSink(far.clone());
        *why.lock().unwrap() = Some(far.run(&mut sink).await.kind());
    });
    near.send(b"hello", None).unwrap();
    until("it ends", || near_log.has_ended()).await;
    assert_eq!(*refused.lock().unwrap(), Some(io::ErrorKind::PermissionDenied));
    if provider.can_stall() {
        assert_eq!(near_log.heads(), [b"refused"]);
    }
}

/// A sender is slowed down when its receiver has its share of the memory, and goes on when it comes
/// back.
pub async fn what_is_received_is_counted_until_it_is_let_go(provider: Provider) {
    const FRAMES: usize = 12;
    let pool = BufferPool::new(8 * MIB, 0);
    let share = pool.share();
    let [(near, _), (_, far_log)] = provider.running(Some(share.clone())).await;
    for number in 0..FRAMES {
        near.send(&number.to_le_bytes(), Some(Buf::from(vec![7; MIB]))).unwrap();
    }
    near.send(b"no data", None).unwrap();
    until("its share is used", || far_log.count() == 4).await;
    a_while().await;
    assert_eq!((far_log.count(), share.used_bytes()), (4, 4 * MIB), "half, since it is alone");
    let mut heads = Vec::new();
    until("all have come", || {
        heads.extend(std::mem::take(&mut far_log.lock().frames).into_iter().map(|(head, _)| head));
        heads.len() == FRAMES + 1
    })
    .await;
    let expected = numbers(FRAMES).into_iter().chain([b"no data".to_vec()]);
    assert_eq!(heads, expected.collect::<Vec<_>>());
    until("it is let go", || share.used_bytes() == 0).await;
    near.send(b"counted", None).unwrap();
    until("a head counts, too", || share.used_bytes() == b"counted".len()).await;
    far_log.lock().frames.clear();
    assert_eq!(pool.stats().used_bytes, 0);
}

pub async fn both_ends_know_who_is_there(provider: Provider) {
    let near = provider.connector.connect().await.unwrap();
    let incoming = provider.accept().await;
    let who = incoming.peer();
    if provider.is_tcp() {
        let (Peer::Ip(there), Peer::Ip(here)) = (near.peer(), who) else { panic!("{who:?}") };
        assert!(there.ip().is_loopback() && here.ip().is_loopback() && there != here);
        assert_eq!(near.peer().to_string(), provider.connector.target().replace("tcp://", ""));
    } else {
        assert_eq!((near.peer(), who), (Peer::Local, Peer::Local));
        assert!(who.is_privileged());
    }
    let far = incoming.establish().unwrap();
    assert_eq!((far.peer(), far.peer_groups()), (who, Vec::new()));
}

pub async fn the_first_head_is_looked_at_and_stays(provider: Provider) {
    let near = provider.connector.connect().await.unwrap();
    let incoming = provider.accept().await;
    assert!(timeout(Duration::from_millis(20), incoming.first_head()).await.is_err());
    near.send(b"first", None).unwrap();
    near.send(b"second", Some(Buf::from(&b"data"[..]))).unwrap();
    for _ in 0..2 {
        assert_eq!(patiently(incoming.first_head()).await.unwrap(), b"first");
    }
    // The connection is served on another thread than the one that looked at the head.
    let log = Log::default();
    let running = log.clone();
    provider.spawn_far(async move { running.run(incoming.establish().unwrap(), None).await });
    until("both are there", || log.count() == 2).await;
    assert_eq!(log.heads(), [&b"first"[..], b"second"]);
}

pub async fn a_first_head_that_never_comes_or_is_too_long_is_an_error(provider: Provider) {
    let near = provider.connector.connect().await.unwrap();
    let incoming = provider.accept().await;
    let looking = async { incoming.first_head().await.unwrap_err().kind() };
    let ending = async {
        a_while().await;
        drop(near);
    };
    let (mut looking, mut ending) = (std::pin::pin!(looking), std::pin::pin!(ending));
    let mut has_ended = false;
    let both = std::future::poll_fn(|cx| {
        has_ended = has_ended || ending.as_mut().poll(cx).is_ready();
        looking.as_mut().poll(cx)
    });
    assert_eq!(patiently(both).await, io::ErrorKind::UnexpectedEof);
    for (bytes, is_taken) in [(FIRST_HEAD_MAX_BYTES, true), (FIRST_HEAD_MAX_BYTES + 1, false)] {
        let near = provider.connector.connect().await.unwrap();
        let incoming = provider.accept().await;
        near.send(&content(bytes, 1), None).unwrap();
        match patiently(incoming.first_head()).await {
            Ok(head) => assert!(is_taken && head == content(bytes, 1)),
            Err(error) => assert!(!is_taken && error.raw_os_error() == Some(libc::EMSGSIZE)),
        }
    }
}

pub async fn a_refused_peer_learns_of_it(mut provider: Provider) {
    let run = |connection| {
        let log = Log::default();
        spawn(log.clone().run(connection, None));
        log
    };
    let turned_away = run(provider.connector.connect().await.unwrap());
    drop(provider.accept().await);
    until("it ends", || turned_away.has_ended()).await;
    let waiting = run(provider.connector.connect().await.unwrap());
    drop(provider.listener.take());
    until("it ends with the listener", || waiting.has_ended()).await;
    let refused = provider.connector.connect().await.err().unwrap().kind();
    assert!(matches!(refused, io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound));
}

pub async fn other_threads_may_send(provider: Provider) {
    if provider.is_simulated() {
        return; // it has none
    }
    let [(near, _), (_, far_log)] = provider.running(None).await;
    a_while().await; // both are at rest
    let sender = std::thread::spawn(move || near.send(b"elsewhere", None).map(|()| near));
    let near = sender.join().unwrap().unwrap();
    until("it is there", || far_log.count() == 1).await;
    near.close();
}

/// Whatever had arrived of one connection was worked off before any other connection was served.
pub async fn one_connection_leaves_others_their_tick(provider: Provider) {
    if provider.is_simulated() {
        return; // no time passes there while somebody works
    }
    const FRAMES: usize = 20;
    let (near, far) = provider.pair().await;
    let events = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..FRAMES {
        near.send(b"work", None).unwrap();
    }
    near.flush();
    let (mut sink, others) = (Slow(events.clone()), events.clone());
    provider.spawn_far(async move {
        spawn(async move { drop(far.run(&mut sink).await) });
        while others.lock().unwrap().iter().filter(|event| **event == "frame").count() < FRAMES {
            yield_now().await;
            others.lock().unwrap().push("other");
        }
    });
    let handled = || events.lock().unwrap().iter().filter(|event| **event == "frame").count();
    until("all are handled", || handled() == FRAMES).await;
    let events = events.lock().unwrap();
    let longest = events.split(|event| *event == "other").map(<[_]>::len).max();
    assert!(longest <= Some(2), "{events:?}");
}
