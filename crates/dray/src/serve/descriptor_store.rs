//! The descriptor store keeps files that were deleted while open, over the death of the server.
//!
//! A second small process holds a descriptor of each such file. The file system below keeps a file while a
//! descriptor of it is open. The next server finds the file by its id. Server and store talk over a
//! socket in the state directory. A message is one operation and one key.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dray_backends::backend::DescriptorStore;
use dray_core::{FileId, FsUuid};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::error::{ErrorContext, Failure};
use crate::paths;

/// Descriptors that the store process holds at most; of files beyond them the server says that
/// they would end with it.
const HELD_MAX: usize = 4096;
/// Descriptors that the store process needs besides: its own, and that of the next server.
const STORE_SPARE: usize = 32;
/// How long the new process may take until it listens, on a machine that swaps. Without it files that
/// were deleted while open end with this server.
const START_MAX: Duration = Duration::from_secs(20);
/// How long it may take to say what it holds.
const TELL_MAX: Duration = Duration::from_secs(5);

pub const OP_HOLD: u8 = 1;
pub const OP_RELEASE: u8 = 2;
/// From the store process: it holds this.
pub const OP_HELD: u8 = 3;
/// From the store process: that was all.
pub const OP_END: u8 = 4;

/// Operation, file system, file.
pub const MESSAGE_BYTES: usize = 33;
pub type StoreMessage = [u8; MESSAGE_BYTES];
/// File system and file.
pub type StoreKey = [u8; 32];

/// Where the store process of a state directory listens.
///
/// The file keeps its first name: a server that is upgraded finds a running store by this name.
pub fn socket_path(state: &Path) -> PathBuf {
    state.join("keeper.sock")
}

/// The address of that socket, for as long as what comes with it exists. One that is longer than an
/// address can be (`sun_path`, 108 bytes: unix(7)) goes by a descriptor of its directory.
pub fn socket_address(state: &Path) -> io::Result<(SockAddr, Option<File>)> {
    if let Ok(address) = SockAddr::unix(socket_path(state)) {
        return Ok((address, None));
    }
    let dir = File::open(state)?;
    let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    Ok((SockAddr::unix(socket_path(&by_descriptor))?, Some(dir)))
}

/// How many a store process holds that may have `limit` descriptors (`RLIMIT_NOFILE`, which it has from
/// its server).
pub fn held_max(limit: usize) -> usize {
    HELD_MAX.min(limit.saturating_sub(STORE_SPARE))
}

pub fn message(op: u8, key: &StoreKey) -> StoreMessage {
    let mut message = [op; MESSAGE_BYTES];
    message[1..].copy_from_slice(key);
    message
}

fn key(fs: FsUuid, id: FileId) -> StoreKey {
    let mut key = [0; 32];
    key[..16].copy_from_slice(&fs.0.to_le_bytes());
    key[16..24].copy_from_slice(&id.ino.to_le_bytes());
    key[24..].copy_from_slice(&id.generation.to_le_bytes());
    key
}

/// The server's end.
pub struct DescriptorStoreClient {
    socket: Socket,
    held_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is held, and for how many: two exports of one directory have the same files. None
    /// yet: it is held since the last server, and let go in the end if nobody asks for it.
    held: HashMap<StoreKey, u32>,
    complained: bool,
}

impl std::fmt::Debug for DescriptorStoreClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DescriptorStoreClient({} held)", self.lock().held.len())
    }
}

impl DescriptorStoreClient {
    /// Connects to the store process of the last server, or starts one.
    pub fn start(state: &Path) -> Result<DescriptorStoreClient, Failure> {
        let doing =
            || format!("cannot start the descriptor store of deleted files in {}", state.display());
        if let Ok(client) = DescriptorStoreClient::connect(state) {
            return Ok(client);
        }
        let mut process = Command::new("/proc/self/exe")
            .arg0("dray")
            .arg("keep-files")
            .arg(state)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .doing(doing)?;
        let begin = Instant::now();
        loop {
            let has_ended = process.try_wait().is_ok_and(|ended| ended.is_some());
            match DescriptorStoreClient::connect(state) {
                Ok(client) => return Ok(client),
                Err(error) if has_ended => return Err(error).doing(doing),
                Err(error) if begin.elapsed() > START_MAX => {
                    let late =
                        io::Error::new(error.kind(), format!("not within {START_MAX:?}: {error}"));
                    return Err(late).doing(doing);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn connect(state: &Path) -> io::Result<DescriptorStoreClient> {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        let (address, _dir) = socket_address(state)?;
        socket.connect(&address)?;
        socket.set_read_timeout(Some(TELL_MAX))?;
        let mut held = HashMap::new();
        loop {
            let (message, _) = receive(&socket)?;
            match message[0] {
                OP_HELD => {
                    held.insert(message_key(&message), 0);
                }
                OP_END => break,
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        let held_max = held_max(paths::raise_file_limit());
        Ok(DescriptorStoreClient {
            socket,
            held_max,
            state: Mutex::new(State { held, complained: false }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the store process to the next server, though this process lasts on.
    pub fn leave(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both); // or it has ended
    }

    /// Lets go what was held for an earlier server of these file systems and nobody came back for.
    pub fn release_inherited(&self, of: impl Fn(FsUuid) -> bool) {
        self.lock().held.retain(|key, users| {
            let stays = *users > 0 || !of(fs_of(key));
            if !stays {
                let _ = send(&self.socket, &message(OP_RELEASE, key), None); // or it has ended
            }
            stays
        });
    }
}

fn fs_of(key: &StoreKey) -> FsUuid {
    FsUuid(u128::from_le_bytes(std::array::from_fn(|index| key[index])))
}

pub fn message_key(message: &StoreMessage) -> StoreKey {
    std::array::from_fn(|index| message[1 + index])
}

impl DescriptorStore for DescriptorStoreClient {
    fn hold(&self, fs: FsUuid, id: FileId, fd: BorrowedFd<'_>) {
        let key = key(fs, id);
        let mut state = self.lock();
        let known = state.held.contains_key(&key);
        let result = if state.held.len() >= self.held_max && !known {
            Err(io::Error::from_raw_os_error(libc::EMFILE))
        } else {
            send(&self.socket, &message(OP_HOLD, &key), Some(fd.as_raw_fd()))
        };
        match result {
            Ok(()) => *state.held.entry(key).or_default() += 1,
            Err(error) if !std::mem::replace(&mut state.complained, true) => {
                log::error!(
                    "a deleted file that is open is lost if the server dies: its descriptor cannot be \
                     stored ({error})"
                );
            }
            Err(_) => {}
        }
    }

    fn holds(&self, fs: FsUuid, id: FileId) -> bool {
        self.lock().held.contains_key(&key(fs, id))
    }

    fn adopt(&self, fs: FsUuid, id: FileId) -> bool {
        let mut state = self.lock();
        let users = state.held.get_mut(&key(fs, id));
        users.map(|users| *users += 1).is_some()
    }

    fn release(&self, fs: FsUuid, id: FileId) {
        let (key, mut state) = (key(fs, id), self.lock());
        let Some(users) = state.held.get_mut(&key) else { return };
        *users = users.saturating_sub(1);
        if *users == 0 {
            state.held.remove(&key);
            let _ = send(&self.socket, &message(OP_RELEASE, &key), None); // or it has ended
        }
    }

    fn keep_for_recovery(&self, fs: FsUuid, id: FileId) {
        if let Some(users) = self.lock().held.get_mut(&key(fs, id)) {
            *users = users.saturating_sub(1);
        }
    }
}

/// Sends a message, and a descriptor with it.
pub fn send(socket: &Socket, message: &StoreMessage, fd: Option<RawFd>) -> io::Result<()> {
    let mut part = libc::iovec { iov_base: message.as_ptr() as *mut _, iov_len: message.len() };
    let mut control = Control::default();
    // SAFETY: an all-zero msghdr is a valid, empty one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    if let Some(fd) = fd {
        header.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: plain arithmetic. Not a byte more: the kernel would look for a next header.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;
        // SAFETY: the control buffer has room for one header and one descriptor, and is
        // aligned for it.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            libc::CMSG_DATA(first).cast::<RawFd>().write_unaligned(fd);
        }
    }
    // SAFETY: everything that the header points to outlives the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives a message, and the descriptor that came with it. Errors: `UnexpectedEof` when
/// the other end has gone.
pub fn receive(socket: &Socket) -> io::Result<(StoreMessage, Option<OwnedFd>)> {
    let mut message = [0; MESSAGE_BYTES];
    let mut part = libc::iovec { iov_base: message.as_mut_ptr().cast(), iov_len: MESSAGE_BYTES };
    let mut control = Control::default();
    // SAFETY: an all-zero msghdr is a valid, empty one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_BYTES;
    // SAFETY: everything that the header points to outlives the call.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled in the control buffer; a descriptor in it is ours.
    let fd = unsafe {
        let first = libc::CMSG_FIRSTHDR(&header);
        let rights = !first.is_null()
            && (*first).cmsg_level == libc::SOL_SOCKET
            && (*first).cmsg_type == libc::SCM_RIGHTS;
        rights
            .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<RawFd>().read_unaligned()))
    };
    match got as usize {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        MESSAGE_BYTES => Ok((message, fd)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

const CONTROL_BYTES: usize = 64;

/// Room for the header of one descriptor, aligned as `cmsghdr` wants it.
#[repr(align(8))]
struct Control([u8; CONTROL_BYTES]);

impl Default for Control {
    fn default() -> Control {
        Control([0; CONTROL_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(socket: Socket, held: HashMap<StoreKey, u32>) -> DescriptorStoreClient {
        DescriptorStoreClient {
            socket,
            held_max: HELD_MAX,
            state: Mutex::new(State { held, complained: false }),
        }
    }

    /// A store process outlives upgrades of its server, and upgrades back.
    // proves: P137
    #[test]
    fn processes_of_two_versions_understand_each_other() {
        assert_eq!([OP_HOLD, OP_RELEASE, OP_HELD, OP_END], [1, 2, 3, 4]);
        let said = message(OP_HOLD, &key(FsUuid(5), FileId { ino: 6, generation: 7 }));
        let mut expected = [0; 33];
        [expected[0], expected[1], expected[17], expected[25]] = [1, 5, 6, 7];
        assert_eq!(said, expected);
        assert_eq!(socket_path(Path::new("/state")), Path::new("/state/keeper.sock"));
    }

    /// There was no store process, where a server listened at a Unix socket with a long path, by which its
    /// state directory is named.
    #[test]
    fn a_state_directory_may_have_a_long_path() {
        let base = std::env::temp_dir().join(format!("dray-keeper-{}", std::process::id()));
        for name in ["short".to_owned(), "long".repeat(30)] {
            let state = base.join(name);
            std::fs::create_dir_all(&state).unwrap();
            let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
            let (address, _dir) = socket_address(&state).unwrap();
            listener.bind(&address).unwrap();
            listener.listen(1).unwrap();
            assert!(socket_path(&state).exists());
            let server = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
            let (address, _dir) = socket_address(&state).unwrap();
            server.connect(&address).unwrap();
        }
        std::fs::remove_dir_all(&base).unwrap();
    }

    /// Where a directory is exported twice, the close through one export let go what was open
    /// through the other.
    #[test]
    fn what_two_exports_have_open_is_held_until_both_have_closed_it() {
        let (near, far) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let (fs, id) = (FsUuid(1), FileId { ino: 1, generation: 7 });
        let client = client(near, HashMap::new());
        assert!(!client.adopt(fs, id));
        let file = std::fs::File::open("/dev/null").unwrap();
        client.hold(fs, id, std::os::fd::AsFd::as_fd(&file));
        assert!(client.adopt(fs, id), "the other export opens it, too");
        client.release(fs, id);
        assert!(client.holds(fs, id));
        client.release(fs, id);
        assert!(!client.holds(fs, id));
        let heard = [0; 2].map(|_| receive(&far).unwrap().0[0]);
        assert_eq!(heard, [OP_HOLD, OP_RELEASE]);
    }

    /// A client that had a deleted file open, and opens it no more, looked at it. That kept the
    /// file and its space until the next start of the server.
    #[test]
    fn what_was_only_looked_at_is_let_go_and_what_was_opened_stays() {
        let (near, far) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let fs = FsUuid(1);
        let [seen, opened] = [1, 2].map(|ino| FileId { ino, generation: 7 });
        let held = HashMap::from([seen, opened].map(|id| (key(fs, id), 0)));
        let client = client(near, held);
        assert!(client.holds(fs, seen) && client.holds(fs, opened) && client.adopt(fs, opened));
        client.release_inherited(|other| other != fs);
        assert!(client.holds(fs, seen), "its export is not open yet");
        client.release_inherited(|other| other == fs);
        assert!(!client.holds(fs, seen) && client.holds(fs, opened));
        client.release(fs, opened);
        for id in [seen, opened] {
            assert_eq!(receive(&far).unwrap().0, message(OP_RELEASE, &key(fs, id)));
        }
    }

    /// An export that is taken away closes its files, and their users come back for them.
    #[test]
    fn what_is_left_is_held_for_who_comes_back() {
        let (near, far) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let (fs, id) = (FsUuid(1), FileId { ino: 1, generation: 7 });
        let client = client(near, HashMap::new());
        let file = std::fs::File::open("/dev/null").unwrap();
        client.hold(fs, id, std::os::fd::AsFd::as_fd(&file));
        client.keep_for_recovery(fs, id);
        assert!(client.holds(fs, id) && client.adopt(fs, id));
        client.release(fs, id);
        assert!(!client.holds(fs, id));
        let heard = [0; 2].map(|_| receive(&far).unwrap().0[0]);
        assert_eq!(heard, [OP_HOLD, OP_RELEASE]);
    }

    /// The store took as many as it may have descriptors; then it could not hear the next server, and let
    /// go of all.
    #[test]
    fn a_descriptor_store_has_descriptors_left_for_the_next_server() {
        assert_eq!(held_max(20_000), HELD_MAX);
        assert_eq!(held_max(4096), 4096 - STORE_SPARE);
        assert_eq!(held_max(16), 0);
    }
}
