//! More clients than a server has descriptors for: those that are too many are refused, and
//! nobody else notices.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::common;
use crate::common::daemons::wait_for_connections;
use crate::common::{Rig, wait_for};
use dray_client::{ConnectError, ConnectOptions, SessionMemory, connect_session};
use dray_core::Errno;
use dray_rt::{DriverKind, Executor};

/// Descriptors of the server, and the connections that come of them: 82, of which one machine has
/// half.
const DESCRIPTORS: usize = 256;
const CONNECTIONS: usize = 41;
/// Connections of one address that may be in their handshake at a time.
const LET_IN_MAX: usize = 4;

fn check(at: &std::path::Path) {
    let text: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(at.join("file"), &text).unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), text);
    let many: Vec<_> =
        (0..100).map(|name| fs::File::create(at.join(name.to_string())).unwrap()).collect();
    drop(many);
}

#[test]
fn clients_beyond_the_descriptors_are_refused_with_the_reason_and_others_go_on() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve_with_descriptors(DESCRIPTORS, &[]);
    let at = rig.mount("mount", "workers=2");
    let of_the_mount = wait_for_connections(&rig, &at); // fewer than asked for on a single CPU
    let target = rig.target().parse().unwrap();
    let mut executor = Executor::new(DriverKind::Epoll).unwrap();
    executor.block_on(async {
        let options = ConnectOptions::default();
        let mut crowd = Vec::new();
        let refused = loop {
            assert!(crowd.len() <= CONNECTIONS, "nobody is refused");
            match connect_session(&target, &options, SessionMemory::heap()).await {
                Ok(session) => crowd.push(session),
                Err(error) => break error,
            }
        };
        assert_eq!(crowd.len(), CONNECTIONS - of_the_mount, "{refused}");
        assert!(matches!(refused, ConnectError::Refused { errno: Errno::EAGAIN, .. }));
        assert!(refused.to_string().contains("more descriptors"), "{refused}");
        check(&at);
        crowd.iter().for_each(|session| session.goodbye());
        dray_rt::sleep(Duration::from_millis(100)).await; // the goodbyes are sent
    });
    let second = rig.path("second");
    fs::create_dir(&second).unwrap();
    let (target, place) = (rig.target(), second.to_str().unwrap().to_owned());
    wait_for("a place", || rig.run(&["mount", &target, &place]).status.success());
    check(&second);
    rig.umount(&second);
    rig.umount(&at);
}

/// A peer that sends nothing takes descriptors, too: few may, and the rest are refused at once.
#[test]
fn a_silent_crowd_takes_no_descriptors_from_others() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve_with_descriptors(DESCRIPTORS, &[]);
    let at = rig.mount("mount", "workers=2");
    let crowd: Vec<UnixStream> =
        (0..500).map(|_| UnixStream::connect(rig.path("socket")).unwrap()).collect();
    check(&at);
    let is_let_in = |mut socket: &UnixStream| {
        socket.set_nonblocking(true).unwrap();
        !matches!(socket.read(&mut [0]), Ok(0))
    };
    // The first are let in, as a rule; a connection of the mount that has shaken hands leaves its
    // place to the next client. When their time for the handshake is over they go, too.
    wait_for("the rest to be turned away", || {
        crowd.iter().filter(|socket| is_let_in(socket)).count() <= LET_IN_MAX
    });
    check(&at);
    drop(crowd);
    rig.umount(&at);
}
