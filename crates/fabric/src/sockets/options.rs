//! What the sockets of all connections are set to.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use dray_core::{Gid, Uid};
use socket2::{SockRef, Socket, TcpKeepalive};

use crate::Peer;

/// A connection without any sign of its peer for 30 + 3 x 10 s is gone. The kernel asks, so an
/// idle client is not woken for it.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;
/// Data that nobody acknowledges for this long end the connection.
pub(crate) const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);
/// Congestion control on loopback: that which every Linux has built in (tcp(7)).
const LOOPBACK_CONGESTION: &[u8] = b"reno";

/// Room for the supplementary groups of most users.
const GROUPS_FEW: usize = 64;

/// Of a connection, before it begins or as it comes.
pub(crate) fn prepare(socket: &Socket, peer: Peer) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    if let Peer::Ip(ip) = peer {
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_keepalive(&keepalive(KEEPALIVE_AFTER, KEEPALIVE_EVERY))?;
        socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX))?;
        calm(socket, ip.ip());
    }
    Ok(())
}

fn keepalive(after: Duration, every: Duration) -> TcpKeepalive {
    TcpKeepalive::new().with_time(after).with_interval(every).with_retries(KEEPALIVE_TRIES)
}

/// Has a connection over TCP end `within` so long of the last sign of the other end, where that is
/// sooner than otherwise. The time is in whole seconds, and 4 at least. Errors: those of
/// setsockopt(2).
pub(crate) fn notice_loss(socket: &impl AsFd, within: Duration) -> io::Result<()> {
    if within >= KEEPALIVE_AFTER + KEEPALIVE_EVERY * KEEPALIVE_TRIES {
        return Ok(());
    }
    let second = Duration::from_secs(1); // the kernel counts in them
    let (after, every) = ((within / 2).max(second), (within / 6).max(second));
    let socket = SockRef::from(socket);
    socket.set_tcp_keepalive(&keepalive(after, every))?;
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX.min(after + every * KEEPALIVE_TRIES)))
}

/// Keeps a connection that stays on this machine from being paced. Many systems use BBR,
/// which looks for a bottleneck that loopback has not, by timers and by sending less for a
/// while. What goes over a network keeps what the system's administrator has chosen.
pub(crate) fn calm(socket: &Socket, ip: IpAddr) {
    if ip.to_canonical().is_loopback() {
        let _ = socket.set_tcp_congestion(LOOPBACK_CONGESTION); // slower without, no more
    }
}

/// The peer at the other end of a Unix socket when it connected, as this process's user namespace
/// numbers users (`SO_PEERCRED`, unix(7)). Errors: those of getsockopt(2).
pub(crate) fn local_peer(socket: &Socket) -> io::Result<Peer> {
    let mut who = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut len = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `who`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no memory and cannot fail.
    let ours = unsafe { libc::geteuid() };
    Ok(if who.uid == 0 || who.uid == ours {
        Peer::Local
    } else {
        Peer::User(Uid(who.uid), Gid(who.gid))
    })
}

/// Supplementary groups of who was at the other end of a Unix socket when it connected
/// (`SO_PEERGROUPS`, Linux 4.13). Errors: those of getsockopt(2).
pub(crate) fn local_peer_groups(socket: &impl AsFd) -> io::Result<Vec<Gid>> {
    let mut groups = vec![0 as libc::gid_t; GROUPS_FEW];
    // Twice at most: they do not change any more.
    for _ in 0..2 {
        let mut len = std::mem::size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `groups`.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &mut len,
            )
        };
        let error = io::Error::last_os_error();
        // The kernel says how long the list is where it had no room.
        groups.resize(len as usize / std::mem::size_of::<libc::gid_t>(), 0);
        match result {
            0 => return Ok(groups.into_iter().map(Gid).collect()),
            _ if error.raw_os_error() != Some(libc::ERANGE) => return Err(error),
            _ => {}
        }
    }
    Err(io::Error::from_raw_os_error(libc::ERANGE))
}

/// The processor that last handled packets of `socket`, where the kernel tells
/// (`SO_INCOMING_CPU`): serving a connection there spares wake-ups across processors.
pub(crate) fn incoming_cpu(socket: &impl AsFd) -> Option<usize> {
    let mut cpu: i32 = -1;
    let mut len = std::mem::size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cpu`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_CPU,
            (&raw mut cpu).cast(),
            &mut len,
        )
    };
    if result == 0 { usize::try_from(cpu).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use dray_rt::{DriverKind, Executor, spawn_join};

    use super::*;
    use crate::sockets::connect::connect_from;
    use crate::sockets::listen::bind_one;
    use crate::{Address, ConnectFrom};

    fn congestion_control(socket: &impl AsFd) -> Vec<u8> {
        let mut name = SockRef::from(socket).tcp_congestion().unwrap();
        name.retain(|&byte| byte != 0);
        name
    }

    #[test]
    fn nothing_paces_a_connection_on_loopback() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            for host in ["127.0.0.1", "0.0.0.0"] {
                let any = (host.parse::<IpAddr>().unwrap(), 0).into();
                let (address, listener) = bind_one(any).unwrap();
                let Address::Tcp { port, .. } = address else { unreachable!() };
                let accepted = spawn_join(async move { listener.next().await.unwrap().socket });
                let near = Address::Tcp { host: "127.0.0.1".into(), port };
                let connection = connect_from(&near, ConnectFrom::Any).await.unwrap();
                assert_eq!(congestion_control(&accepted.await.unwrap()), b"reno");
                assert_eq!(congestion_control(connection.socket()), b"reno");
            }
        });
    }

    /// Where leases are short, a machine that is gone kept its locks for 40 s and the lease.
    #[test]
    fn a_loss_is_noticed_within_the_time_that_is_wanted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket =
            Socket::from(std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        prepare(&socket, Peer::Ip(listener.local_addr().unwrap())).unwrap();
        let noticed = || {
            let tries = socket.tcp_keepalive_retries().unwrap();
            let by_probes = socket.tcp_keepalive_time().unwrap()
                + socket.tcp_keepalive_interval().unwrap() * tries;
            (by_probes.as_secs(), socket.tcp_user_timeout().unwrap().unwrap().as_secs())
        };
        for (within_s, expected) in [(3600, (60, 30)), (60, (60, 30)), (8, (7, 7)), (1, (4, 4))] {
            notice_loss(&socket, Duration::from_secs(within_s)).unwrap();
            let (probes, unacknowledged) = noticed();
            assert_eq!(probes, expected.0, "{within_s}");
            assert_eq!(unacknowledged, expected.1, "{within_s}");
        }
    }
}
