//! Requests decoded from either framing.
//!
//! On /dev/fuse a request is one message: header, fixed arguments, names and data. On a
//! ring the header and the arguments come in a block of their own, names and data in the
//! entry's payload. Both are cut into the same three parts and decoded by the same code.
//! Every length is checked; no input makes it panic.

use dray_core::{Errno, Error, Gid, Name, Pid, Result, Timestamp, Uid};

use super::abi::{self, op};
use super::request::{
    AttributeOperation, CopyArgs, FileOperation, Head, LockArgs, NameOperation, OpenOperation,
    Operation, Request, SessionOperation, SetattrArgs, WriteArgs, XattrOperation,
};
use super::wire::FieldReader;

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
    let args = FieldReader(args);
    let payload = FieldReader(payload);
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

fn name<'a>(payload: &mut FieldReader<'a>) -> Result<&'a Name> {
    Name::new(payload.string().ok_or_else(short)?)
}

fn decode_naming<'a>(
    opcode: u32,
    mut args: FieldReader<'a>,
    mut payload: FieldReader<'a>,
) -> Result<Operation<'a>> {
    let mut arg = || args.u32().ok_or_else(short);
    Ok(match opcode {
        op::LOOKUP => match payload.string().ok_or_else(short)? {
            b"." => Operation::LookupSelf,
            b".." => Operation::LookupParent,
            name => Operation::Names(NameOperation::Lookup { name: Name::new(name)? }),
        },
        op::UNLINK => Operation::Names(NameOperation::Unlink { name: name(&mut payload)? }),
        op::RMDIR => Operation::Names(NameOperation::Rmdir { name: name(&mut payload)? }),
        op::SYMLINK => {
            let name = name(&mut payload)?;
            Operation::Names(NameOperation::Symlink {
                name,
                target: payload.string().ok_or_else(short)?,
            })
        }
        op::MKNOD => {
            let (mode, rdev, umask) = (arg()?, arg()?, arg()?);
            Operation::Names(NameOperation::Mknod { name: name(&mut payload)?, mode, rdev, umask })
        }
        op::MKDIR => {
            let (mode, umask) = (arg()?, arg()?);
            Operation::Names(NameOperation::Mkdir { name: name(&mut payload)?, mode, umask })
        }
        op::CREATE => {
            let (flags, mode, umask, open_flags) = (arg()?, arg()?, arg()?, arg()?);
            Operation::Opens(OpenOperation::Create {
                name: name(&mut payload)?,
                flags,
                mode,
                umask,
                open_flags,
            })
        }
        op::LINK => {
            let node = args.u64().ok_or_else(short)?;
            Operation::Names(NameOperation::Link { node, name: name(&mut payload)? })
        }
        _ => {
            let to_dir = args.u64().ok_or_else(short)?;
            let flags = if opcode == op::RENAME2 { args.u32().ok_or_else(short)? } else { 0 };
            let from = name(&mut payload)?;
            Operation::Names(NameOperation::Rename {
                name: from,
                to_dir,
                to_name: name(&mut payload)?,
                flags,
            })
        }
    })
}

fn decode_other<'a>(
    opcode: u32,
    mut args: FieldReader<'a>,
    mut payload: FieldReader<'a>,
) -> Option<Operation<'a>> {
    let a = &mut args;
    Some(match opcode {
        op::READ | op::READDIR | op::READDIRPLUS => decode_read(opcode, a)?,
        op::WRITE => decode_write(a, payload.0.len())?,
        op::GETATTR => {
            Operation::Attributes(AttributeOperation::Getattr { fh: decode_getattr(a)? })
        }
        op::STATX => {
            let fh = decode_getattr(a)?;
            let (_, mask) = (a.u32()?, a.u32()?);
            Operation::Attributes(AttributeOperation::Statx { fh, mask })
        }
        op::SETATTR => Operation::Attributes(AttributeOperation::Setattr(decode_setattr(a)?)),
        op::OPEN => Operation::Opens(OpenOperation::Open { flags: a.u32()?, open_flags: a.u32()? }),
        op::TMPFILE => {
            let (flags, mode, umask) = (a.u32()?, a.u32()?, a.u32()?);
            Operation::Opens(OpenOperation::Tmpfile { flags, mode, umask, open_flags: a.u32()? })
        }
        op::OPENDIR => Operation::Opens(OpenOperation::Opendir { flags: a.u32()? }),
        op::RELEASE => {
            let (fh, _, release_flags) = (a.u64()?, a.u32()?, a.u32()?);
            Operation::Release { fh, release_flags, owner: a.u64()? }
        }
        op::RELEASEDIR => Operation::Releasedir { fh: a.u64()? },
        op::FLUSH => {
            let (fh, _) = (a.u64()?, a.u64()?);
            Operation::Flush { fh, owner: a.u64()? }
        }
        op::FSYNC => Operation::Files(FileOperation::Fsync { fh: a.u64()?, fsync_flags: a.u32()? }),
        op::FSYNCDIR => {
            Operation::Files(FileOperation::Fsyncdir { fh: a.u64()?, fsync_flags: a.u32()? })
        }
        op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR => {
            decode_xattr(opcode, a, &mut payload)?
        }
        op::GETLK => Operation::Getlk(decode_lock(a)?),
        op::SETLK => Operation::Setlk { lock: decode_lock(a)?, wait: false },
        op::SETLKW => Operation::Setlk { lock: decode_lock(a)?, wait: true },
        op::ACCESS => Operation::Attributes(AttributeOperation::Access { mask: a.u32()? }),
        op::FORGET => Operation::Session(SessionOperation::Forget { lookups: a.u64()? }),
        op::BATCH_FORGET => decode_forgets(a, &mut payload)?,
        op::INTERRUPT => Operation::Session(SessionOperation::Interrupt { unique: a.u64()? }),
        op::IOCTL => decode_ioctl(a, &mut payload)?,
        op::FALLOCATE => {
            let (fh, at, len_bytes) = (a.u64()?, a.u64()?, a.u64()?);
            Operation::Files(FileOperation::Fallocate { fh, at, len_bytes, mode: a.u32()? })
        }
        op::LSEEK => {
            Operation::Files(FileOperation::Lseek { fh: a.u64()?, at: a.u64()?, whence: a.u32()? })
        }
        op::COPY_FILE_RANGE => {
            Operation::Files(FileOperation::CopyFileRange(decode_copy(a, false)?))
        }
        op::COPY_FILE_RANGE_64 => {
            Operation::Files(FileOperation::CopyFileRange(decode_copy(a, true)?))
        }
        op::READLINK => Operation::Names(NameOperation::Readlink),
        op::STATFS => Operation::Statfs,
        op::INIT => Operation::Session(SessionOperation::Init),
        op::DESTROY => Operation::Session(SessionOperation::Destroy),
        _ => Operation::Session(SessionOperation::Other),
    })
}

fn decode_forgets<'a>(
    args: &mut FieldReader<'a>,
    payload: &mut FieldReader<'a>,
) -> Option<Operation<'a>> {
    let count = args.u32()?;
    let list = payload.bytes((count as usize).checked_mul(16)?)?;
    Some(Operation::Session(SessionOperation::BatchForget { count, list }))
}

fn decode_ioctl<'a>(
    args: &mut FieldReader<'a>,
    payload: &mut FieldReader<'a>,
) -> Option<Operation<'a>> {
    let (fh, _, cmd, _) = (args.u64()?, args.u32()?, args.u32()?, args.u64()?);
    let (in_size, out_size) = (args.u32()?, args.u32()?);
    Some(Operation::Ioctl { fh, cmd, data: payload.bytes(in_size as usize)?, out_size })
}

fn decode_read<'a>(opcode: u32, args: &mut FieldReader<'a>) -> Option<Operation<'a>> {
    let (fh, at, size) = (args.u64()?, args.u64()?, args.u32()?);
    Some(match opcode {
        op::READ => Operation::Read { fh, at, size },
        _ => Operation::Readdir { fh, at, size, plus: opcode == op::READDIRPLUS },
    })
}

fn decode_write<'a>(args: &mut FieldReader<'a>, data_bytes: usize) -> Option<Operation<'a>> {
    let (fh, at, size) = (args.u64()?, args.u64()?, args.u32()?);
    let (write_flags, _owner, flags) = (args.u32()?, args.u64()?, args.u32()?);
    (size as usize == data_bytes).then_some(Operation::Write(WriteArgs {
        fh,
        at,
        size,
        write_flags,
        flags,
    }))
}

/// The open file that attributes are asked of, if it is one.
fn decode_getattr(args: &mut FieldReader<'_>) -> Option<Option<u64>> {
    let (flags, _, fh) = (args.u32()?, args.u32()?, args.u64()?);
    Some((flags & abi::GETATTR_FH != 0).then_some(fh))
}

fn decode_xattr<'a>(
    opcode: u32,
    args: &mut FieldReader<'a>,
    payload: &mut FieldReader<'a>,
) -> Option<Operation<'a>> {
    Some(match opcode {
        op::SETXATTR => {
            let (size, flags) = (args.u32()?, args.u32()?);
            let name = payload.string()?;
            Operation::Xattrs(XattrOperation::Setxattr {
                name,
                value: payload.bytes(size as usize)?,
                flags,
            })
        }
        op::GETXATTR => Operation::Xattrs(XattrOperation::Getxattr {
            size: args.u32()?,
            name: payload.string()?,
        }),
        op::LISTXATTR => Operation::Xattrs(XattrOperation::Listxattr { size: args.u32()? }),
        _ => Operation::Xattrs(XattrOperation::Removexattr { name: payload.string()? }),
    })
}

fn decode_copy(args: &mut FieldReader<'_>, wide: bool) -> Option<CopyArgs> {
    Some(CopyArgs {
        fh_in: args.u64()?,
        at_in: args.u64()?,
        node_out: args.u64()?,
        fh_out: args.u64()?,
        at_out: args.u64()?,
        len_bytes: args.u64()?,
        flags: args.u64()?,
        wide,
    })
}

fn decode_lock(args: &mut FieldReader<'_>) -> Option<LockArgs> {
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

fn decode_setattr(args: &mut FieldReader<'_>) -> Option<SetattrArgs> {
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
        let mut fields = FieldReader(rest);
        let (size, kind) = (fields.u32()? as usize, fields.u32()?);
        if kind == abi::EXT_GROUPS {
            return (fields.u32()? > 0).then_some(Gid(fields.u32()?));
        }
        rest = rest.get(size.max(8)..)?; // never less than its own header
    }
}

/// Pairs of node and lookup count of a BATCH_FORGET.
pub fn forgets(list: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    list.chunks_exact(16).filter_map(|pair| {
        let mut fields = FieldReader(pair);
        Some((fields.u64()?, fields.u64()?))
    })
}
