//! What the kernel asks: requests decoded from either framing.
//!
//! On /dev/fuse a request is one message: header, fixed arguments, names and data. On a
//! ring the header and the arguments come in a block of their own, names and data in the
//! entry's payload. Both are cut into the same three parts and decoded by the same code.
//! Every length is checked; no input makes it panic.

use dray_core::{Errno, Error, Gid, Name, Pid, Result, Timestamp, Uid};

use super::abi::{self, op};
use super::wire::Fields;

/// The header of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of the whole request.
    pub len: u32,
    /// Operation code.
    pub opcode: u32,
    /// Names the request within the connection.
    pub unique: u64,
    /// The node it is about.
    pub node: u64,
    /// Caller's file system user id.
    pub uid: Uid,
    /// Caller's file system group id.
    pub gid: Gid,
    /// Caller's thread; 0 for the kernel itself or where it cannot be seen from here.
    pub pid: Pid,
    /// Bytes of extensions at the end of the request.
    pub extension_bytes: usize,
}

impl Head {
    /// Decodes the first 40 bytes; none if there are fewer.
    pub fn decode(bytes: &[u8]) -> Option<Head> {
        let mut fields = Fields(bytes);
        Some(Head {
            len: fields.u32()?,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            node: fields.u64()?,
            uid: Uid(fields.u32()?),
            gid: Gid(fields.u32()?),
            pid: Pid(fields.u32()?),
            extension_bytes: usize::from(fields.u16()?) * 8,
        })
    }
}

/// A lock as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct LockArgs {
    pub fh: u64,
    pub owner: u64,
    pub start: u64,
    pub end: u64,
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: u32,
    pub pid: Pid,
    /// flock(2), not fcntl(2).
    pub flock: bool,
}

/// Arguments of SETATTR as they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SetattrArgs {
    pub valid: u32,
    pub fh: u64,
    pub size: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub mode: u32,
    pub uid: Uid,
    pub gid: Gid,
}

/// Arguments of COPY_FILE_RANGE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CopyArgs {
    pub fh_in: u64,
    pub at_in: u64,
    pub node_out: u64,
    pub fh_out: u64,
    pub at_out: u64,
    pub len_bytes: u64,
    pub flags: u64,
    /// The answer has room for 64 bits.
    pub wide: bool,
}

/// What is asked, with the arguments. Names and fields are those of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Operation<'a> {
    Lookup {
        name: &'a Name,
    },
    Forget {
        lookups: u64,
    },
    BatchForget {
        count: u32,
        list: &'a [u8],
    },
    Getattr {
        fh: Option<u64>,
    },
    Setattr(SetattrArgs),
    Readlink,
    Symlink {
        name: &'a Name,
        target: &'a [u8],
    },
    Mknod {
        name: &'a Name,
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a Name,
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a Name,
    },
    Rmdir {
        name: &'a Name,
    },
    Rename {
        name: &'a Name,
        to_dir: u64,
        to_name: &'a Name,
        flags: u32,
    },
    Link {
        node: u64,
        name: &'a Name,
    },
    Open {
        flags: u32,
        open_flags: u32,
    },
    Create {
        name: &'a Name,
        flags: u32,
        mode: u32,
        umask: u32,
        open_flags: u32,
    },
    Tmpfile {
        flags: u32,
        mode: u32,
        umask: u32,
        open_flags: u32,
    },
    Read {
        fh: u64,
        at: u64,
        size: u32,
    },
    Write {
        fh: u64,
        at: u64,
        size: u32,
        write_flags: u32,
        flags: u32,
    },
    Statfs,
    Release {
        fh: u64,
        release_flags: u32,
        owner: u64,
    },
    Fsync {
        fh: u64,
        fsync_flags: u32,
    },
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
    },
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Flush {
        fh: u64,
        owner: u64,
    },
    Opendir {
        flags: u32,
    },
    Readdir {
        fh: u64,
        at: u64,
        size: u32,
        plus: bool,
    },
    Releasedir {
        fh: u64,
    },
    Fsyncdir {
        fh: u64,
        fsync_flags: u32,
    },
    Getlk(LockArgs),
    Setlk {
        lock: LockArgs,
        wait: bool,
    },
    Access {
        mask: u32,
    },
    Interrupt {
        unique: u64,
    },
    Ioctl {
        fh: u64,
        cmd: u32,
        data: &'a [u8],
        out_size: u32,
    },
    Fallocate {
        fh: u64,
        at: u64,
        len_bytes: u64,
        mode: u32,
    },
    Lseek {
        fh: u64,
        at: u64,
        whence: u32,
    },
    CopyFileRange(CopyArgs),
    Statx {
        fh: Option<u64>,
        mask: u32,
    },
    Init,
    Destroy,
    /// Known to the kernel, not served.
    Other,
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Who asks, about what.
    pub head: Head,
    /// What is asked.
    pub op: Operation<'a>,
    /// A supplementary group of the caller that matters for a creation.
    pub group: Option<Gid>,
}

/// Decodes one message of /dev/fuse. Errors: `EIO` for one that is cut short or
/// contradicts itself, the errors of [`Name::new`] for a bad name.
pub fn decode_classic(message: &[u8]) -> Result<Request<'_>> {
    let head = Head::decode(message).ok_or_else(short)?;
    if head.len as usize != message.len() || message.len() < abi::IN_HEADER_BYTES {
        return Err(short());
    }
    let rest = &message[abi::IN_HEADER_BYTES..];
    // INIT grew over time; its own decoder looks at what there is.
    let args_bytes = if head.opcode == op::INIT { rest.len() } else { args_bytes(&head) };
    let (args, payload) = rest.split_at_checked(args_bytes).ok_or_else(short)?;
    decode(head, args, payload)
}

/// Decodes a request of a ring entry: header block, block of arguments (at least as long
/// as the operation's), payload. Errors as [`decode_classic`].
pub fn decode_ring<'a>(head: &[u8], args: &'a [u8], payload: &'a [u8]) -> Result<Request<'a>> {
    let head = Head::decode(head).ok_or_else(short)?;
    let args = args.get(..args_bytes(&head)).ok_or_else(short)?;
    decode(head, args, payload)
}

fn args_bytes(head: &Head) -> usize {
    abi::op_args_bytes(head.opcode).unwrap_or(0)
}

fn short() -> Error {
    Error::new(Errno::EIO).because("a request of the kernel is cut short")
}

fn decode<'a>(head: Head, args: &'a [u8], payload: &'a [u8]) -> Result<Request<'a>> {
    let at = payload.len().checked_sub(head.extension_bytes).ok_or_else(short)?;
    let (payload, extensions) = payload.split_at(at);
    let args = Fields(args);
    let payload = Fields(payload);
    let op = match head.opcode {
        op::LOOKUP
        | op::UNLINK
        | op::RMDIR
        | op::SYMLINK
        | op::MKNOD
        | op::MKDIR
        | op::RENAME
        | op::RENAME2
        | op::LINK
        | op::CREATE => decode_naming(head.opcode, args, payload)?,
        _ => decode_other(head.opcode, args, payload).ok_or_else(short)?,
    };
    Ok(Request { head, op, group: decode_group(extensions) })
}

fn name<'a>(payload: &mut Fields<'a>) -> Result<&'a Name> {
    Name::new(payload.string().ok_or_else(short)?)
}

fn decode_naming<'a>(
    opcode: u32,
    mut args: Fields<'a>,
    mut payload: Fields<'a>,
) -> Result<Operation<'a>> {
    let mut arg = || args.u32().ok_or_else(short);
    Ok(match opcode {
        op::LOOKUP => Operation::Lookup { name: name(&mut payload)? },
        op::UNLINK => Operation::Unlink { name: name(&mut payload)? },
        op::RMDIR => Operation::Rmdir { name: name(&mut payload)? },
        op::SYMLINK => {
            let name = name(&mut payload)?;
            Operation::Symlink { name, target: payload.string().ok_or_else(short)? }
        }
        op::MKNOD => {
            let (mode, rdev, umask) = (arg()?, arg()?, arg()?);
            Operation::Mknod { name: name(&mut payload)?, mode, rdev, umask }
        }
        op::MKDIR => {
            let (mode, umask) = (arg()?, arg()?);
            Operation::Mkdir { name: name(&mut payload)?, mode, umask }
        }
        op::CREATE => {
            let (flags, mode, umask, open_flags) = (arg()?, arg()?, arg()?, arg()?);
            Operation::Create { name: name(&mut payload)?, flags, mode, umask, open_flags }
        }
        op::LINK => {
            let node = args.u64().ok_or_else(short)?;
            Operation::Link { node, name: name(&mut payload)? }
        }
        _ => {
            let to_dir = args.u64().ok_or_else(short)?;
            let flags = if opcode == op::RENAME2 { args.u32().ok_or_else(short)? } else { 0 };
            let from = name(&mut payload)?;
            Operation::Rename { name: from, to_dir, to_name: name(&mut payload)?, flags }
        }
    })
}

fn decode_other<'a>(
    opcode: u32,
    mut args: Fields<'a>,
    mut payload: Fields<'a>,
) -> Option<Operation<'a>> {
    let a = &mut args;
    Some(match opcode {
        op::READ | op::READDIR | op::READDIRPLUS => {
            let (fh, at, size) = (a.u64()?, a.u64()?, a.u32()?);
            match opcode {
                op::READ => Operation::Read { fh, at, size },
                _ => Operation::Readdir { fh, at, size, plus: opcode == op::READDIRPLUS },
            }
        }
        op::WRITE => decode_write(a, payload.0.len())?,
        op::GETATTR => {
            let (flags, _, fh) = (a.u32()?, a.u32()?, a.u64()?);
            Operation::Getattr { fh: (flags & abi::GETATTR_FH != 0).then_some(fh) }
        }
        op::STATX => {
            let (flags, _, fh) = (a.u32()?, a.u32()?, a.u64()?);
            let (_, mask) = (a.u32()?, a.u32()?);
            Operation::Statx { fh: (flags & abi::GETATTR_FH != 0).then_some(fh), mask }
        }
        op::SETATTR => Operation::Setattr(decode_setattr(a)?),
        op::OPEN => Operation::Open { flags: a.u32()?, open_flags: a.u32()? },
        op::TMPFILE => {
            let (flags, mode, umask) = (a.u32()?, a.u32()?, a.u32()?);
            Operation::Tmpfile { flags, mode, umask, open_flags: a.u32()? }
        }
        op::OPENDIR => Operation::Opendir { flags: a.u32()? },
        op::RELEASE => {
            let (fh, _, release_flags) = (a.u64()?, a.u32()?, a.u32()?);
            Operation::Release { fh, release_flags, owner: a.u64()? }
        }
        op::RELEASEDIR => Operation::Releasedir { fh: a.u64()? },
        op::FLUSH => {
            let (fh, _) = (a.u64()?, a.u64()?);
            Operation::Flush { fh, owner: a.u64()? }
        }
        op::FSYNC => Operation::Fsync { fh: a.u64()?, fsync_flags: a.u32()? },
        op::FSYNCDIR => Operation::Fsyncdir { fh: a.u64()?, fsync_flags: a.u32()? },
        op::SETXATTR => {
            let (size, flags) = (a.u32()?, a.u32()?);
            let name = payload.string()?;
            Operation::Setxattr { name, value: payload.bytes(size as usize)?, flags }
        }
        op::GETXATTR => Operation::Getxattr { size: a.u32()?, name: payload.string()? },
        op::LISTXATTR => Operation::Listxattr { size: a.u32()? },
        op::REMOVEXATTR => Operation::Removexattr { name: payload.string()? },
        op::GETLK => Operation::Getlk(decode_lock(a)?),
        op::SETLK => Operation::Setlk { lock: decode_lock(a)?, wait: false },
        op::SETLKW => Operation::Setlk { lock: decode_lock(a)?, wait: true },
        op::ACCESS => Operation::Access { mask: a.u32()? },
        op::FORGET => Operation::Forget { lookups: a.u64()? },
        op::BATCH_FORGET => {
            let count = a.u32()?;
            let list = payload.bytes((count as usize).checked_mul(16)?)?;
            Operation::BatchForget { count, list }
        }
        op::INTERRUPT => Operation::Interrupt { unique: a.u64()? },
        op::IOCTL => {
            let (fh, _, cmd, _) = (a.u64()?, a.u32()?, a.u32()?, a.u64()?);
            let (in_size, out_size) = (a.u32()?, a.u32()?);
            Operation::Ioctl { fh, cmd, data: payload.bytes(in_size as usize)?, out_size }
        }
        op::FALLOCATE => {
            let (fh, at, len_bytes) = (a.u64()?, a.u64()?, a.u64()?);
            Operation::Fallocate { fh, at, len_bytes, mode: a.u32()? }
        }
        op::LSEEK => Operation::Lseek { fh: a.u64()?, at: a.u64()?, whence: a.u32()? },
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => Operation::CopyFileRange(CopyArgs {
            fh_in: a.u64()?,
            at_in: a.u64()?,
            node_out: a.u64()?,
            fh_out: a.u64()?,
            at_out: a.u64()?,
            len_bytes: a.u64()?,
            flags: a.u64()?,
            wide: opcode == op::COPY_FILE_RANGE_64,
        }),
        op::READLINK => Operation::Readlink,
        op::STATFS => Operation::Statfs,
        op::INIT => Operation::Init,
        op::DESTROY => Operation::Destroy,
        _ => Operation::Other,
    })
}

fn decode_write<'a>(args: &mut Fields<'a>, data_bytes: usize) -> Option<Operation<'a>> {
    let (fh, at, size) = (args.u64()?, args.u64()?, args.u32()?);
    let (write_flags, _owner, flags) = (args.u32()?, args.u64()?, args.u32()?);
    (size as usize == data_bytes).then_some(Operation::Write { fh, at, size, write_flags, flags })
}

fn decode_lock(args: &mut Fields<'_>) -> Option<LockArgs> {
    Some(LockArgs {
        fh: args.u64()?,
        owner: args.u64()?,
        start: args.u64()?,
        end: args.u64()?,
        kind: args.u32()?,
        pid: Pid(args.u32()?),
        flock: args.u32()? & abi::LK_FLOCK != 0,
    })
}

fn decode_setattr(args: &mut Fields<'_>) -> Option<SetattrArgs> {
    let (valid, _) = (args.u32()?, args.u32()?);
    let (fh, size, _owner) = (args.u64()?, args.u64()?, args.u64()?);
    let (atime, mtime, _ctime) = (args.u64()? as i64, args.u64()? as i64, args.u64()?);
    let (atime_nsec, mtime_nsec, _) = (args.u32()?, args.u32()?, args.u32()?);
    let (mode, _) = (args.u32()?, args.u32()?);
    let (uid, gid) = (Uid(args.u32()?), Gid(args.u32()?));
    // A time that no clock shows would travel on and hurt elsewhere.
    let time = |sec, nsec| Timestamp { sec, nsec: u32::min(nsec, 999_999_999) };
    Some(SetattrArgs {
        valid,
        fh,
        size,
        atime: time(atime, atime_nsec),
        mtime: time(mtime, mtime_nsec),
        mode,
        uid,
        gid,
    })
}

/// The first group of a groups extension; other extensions are passed over.
fn decode_group(extensions: &[u8]) -> Option<Gid> {
    let mut rest = extensions;
    loop {
        let mut fields = Fields(rest);
        let (size, kind) = (fields.u32()? as usize, fields.u32()?);
        if kind == abi::EXT_GROUPS {
            return (fields.u32()? > 0).then_some(Gid(fields.u32()?));
        }
        rest = rest.get(size.max(8)..)?; // never less than its own header
    }
}

/// What the kernel offers in INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitArgs {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Bytes that the kernel would read ahead.
    pub readahead_bytes: u32,
    /// Flags, both words.
    pub flags: u64,
}

impl InitArgs {
    /// Decodes the arguments behind the header; none if they are cut short.
    pub fn decode(args: &[u8]) -> Option<InitArgs> {
        let mut fields = Fields(args);
        let (major, minor, readahead_bytes) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let low = u64::from(fields.u32()?);
        let extended = low & abi::init::INIT_EXT != 0;
        let high = if extended { u64::from(fields.u32()?) } else { 0 };
        Some(InitArgs { major, minor, readahead_bytes, flags: high << 32 | low })
    }
}

/// Pairs of node and lookup count of a BATCH_FORGET.
pub fn forgets(list: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    list.chunks_exact(16).filter_map(|pair| {
        let mut fields = Fields(pair);
        Some((fields.u64()?, fields.u64()?))
    })
}
