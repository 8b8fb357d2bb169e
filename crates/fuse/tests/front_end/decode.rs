//! The request decoder: what it makes of good requests, and that nothing makes it panic.

use dray_core::{Errno, Gid};
use dray_fuse::proto::abi::{OP_COUNT, op, op_args_bytes};
use dray_fuse::proto::{OpenOperation, Operation, decode_classic, decode_ring};

fn header(opcode: u32, len: usize, extension_units: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(4u64.to_ne_bytes());
    bytes.extend(1u64.to_ne_bytes());
    for word in [1000u32, 1001, 77] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(extension_units.to_ne_bytes());
    bytes.extend([0, 0]);
    bytes
}

fn message(opcode: u32, body: &[u8], extension_units: u16) -> Vec<u8> {
    let mut bytes = header(opcode, 40 + body.len(), extension_units);
    bytes.extend(body);
    bytes
}

#[test]
fn both_framings_say_the_same() {
    let mut body = Vec::new();
    for word in [libc::O_RDWR as u32 | libc::O_EXCL as u32, 0o644, 0o22, 0] {
        body.extend(word.to_ne_bytes());
    }
    body.extend(b"name\0");
    body.extend([0; 3]); // the extension begins at its own alignment or not at all
    let extension: Vec<u8> = [16u32, 32, 1, 500].iter().flat_map(|w| w.to_ne_bytes()).collect();
    body.extend(&extension);
    let classic = message(op::CREATE, &body, 2);
    let request = decode_classic(&classic).unwrap();
    let Operation::Opens(OpenOperation::Create { name, mode, umask, .. }) = request.op else {
        panic!("{request:?}")
    };
    assert_eq!((name.as_bytes(), mode, umask), (&b"name"[..], 0o644, 0o22));
    assert_eq!(request.group, Some(Gid(500)));
    let mut args = body[..16].to_vec();
    args.resize(128, 0);
    let ring = decode_ring(&classic[..40], &args, &body[16..]).unwrap();
    assert_eq!(ring, request);
}

#[test]
fn bad_names_have_their_errors() {
    let lookup = |name: &[u8]| {
        let bytes = message(op::LOOKUP, name, 0);
        decode_classic(&bytes).map(|_| ()).unwrap_err().errno()
    };
    assert_eq!(lookup(b"a/b\0"), Errno::EINVAL);
    assert_eq!(lookup(b"\0"), Errno::ENOENT);
    assert_eq!(lookup(b"no end"), Errno::EIO);
    assert_eq!(lookup(&[&[b'x'; 256][..], b"\0"].concat()), Errno::ENAMETOOLONG);
}

/// The kernel asks so for what it has a handle of.
#[test]
fn a_node_itself_and_the_one_above_are_looked_up() {
    let lookup = |name: &[u8]| {
        let bytes = message(op::LOOKUP, name, 0);
        format!("{:?}", decode_classic(&bytes).unwrap().op)
    };
    assert_eq!((&*lookup(b".\0"), &*lookup(b"..\0")), ("LookupSelf", "LookupParent"));
    assert!(lookup(b"...\0").starts_with("Names(Lookup {"));
    let unlink = message(op::UNLINK, b"..\0", 0);
    assert_eq!(decode_classic(&unlink).unwrap_err().errno(), Errno::EINVAL);
}

#[test]
fn lengths_that_contradict_the_message_are_refused() {
    let mut bytes = message(op::LOOKUP, b"name\0", 0);
    bytes[0] += 1;
    assert!(decode_classic(&bytes).is_err());
    let too_long_an_extension = message(op::LOOKUP, b"name\0", 9);
    assert!(decode_classic(&too_long_an_extension).is_err());
    let mut write = vec![0; 40];
    write[16..20].copy_from_slice(&9u32.to_ne_bytes());
    write.extend([0; 8]);
    assert!(decode_classic(&message(op::WRITE, &write, 0)).is_err());
    let mut forget = u32::MAX.to_ne_bytes().to_vec();
    forget.extend([0; 20]);
    assert!(decode_classic(&message(op::BATCH_FORGET, &forget, 0)).is_err());
}

// proves: P121
#[test]
fn every_operation_cut_anywhere_is_an_error_or_a_request() {
    for opcode in 0..OP_COUNT as u32 + 8 {
        let args = op_args_bytes(opcode).unwrap_or(0);
        let mut body = vec![0; args];
        body.extend(b"one\0two\0");
        for len in 0..=body.len() {
            let _ = decode_classic(&message(opcode, &body[..len], 0));
            let head = header(opcode, 40 + len, 0);
            let _ = decode_ring(&head, &body[..len.min(args)], &body[len.min(args)..len]);
        }
    }
}

/// A generator of our own: the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

// proves: P121
#[test]
fn noise_is_no_more_than_refused() {
    let mut numbers = Numbers(0x9e37_79b9);
    let mut understood = 0;
    for _ in 0..200_000 {
        let len = (numbers.next() % 160) as usize;
        let body: Vec<u8> = (0..len).map(|_| (numbers.next() % 5) as u8 * 57).collect();
        let opcode = (numbers.next() % 56) as u32;
        let extensions = (numbers.next() % 32 / 29) as u16;
        let bytes = message(opcode, &body, extensions);
        understood += u32::from(decode_classic(&bytes).is_ok());
        let _ = decode_ring(&bytes[..40], &body, &body);
    }
    assert!(understood > 1000, "the noise must reach the inner decoders, too");
}
