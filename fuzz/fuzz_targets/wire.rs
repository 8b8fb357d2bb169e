//! Whatever arrives on a connection: a message, or an error. Neither a crash nor memory out
//! of proportion; and what was understood is written as it was read.
#![no_main]

use dray_core::{Entry, Identity, Op, Statfs};
use dray_rpc::wire::{
    AuditCall, AuditHello, AuditReply, AuditWelcome, BatchHead, BatchReply, Call, CallHead,
    Challenge, Change, FileDurableStamp, Hello, Input, NotifyHead, Proof, RecallMessage, Refused,
    ReplicaHello, ReplicaWelcome, ReplyHead, Stamp, Ticket, Welcome, Wire, get_durable_stamps,
    get_page, peek_kind, peek_tag, peek_unknown_op,
};
use libfuzzer_sys::fuzz_target;

fn again<'a, T: Wire<'a>>(bytes: &'a [u8]) {
    if let Ok(value) = Input::whole::<T>(bytes) {
        let mut out = Vec::new();
        value.put(&mut out);
        assert_eq!(out, bytes, "one meaning has one encoding");
    }
}

fn call(bytes: &[u8]) {
    let mut input = Input(bytes);
    let Ok(head) = CallHead::get_message(&mut input) else { return };
    let Ok(call) = Call::get(head.op, &mut input) else { return };
    assert_eq!(call.op(), head.op);
    let mut out = Vec::new();
    head.put_message(&mut out);
    call.put(&mut out);
    assert_eq!(out, bytes, "one meaning has one encoding");
}

fuzz_target!(|bytes: &[u8]| {
    let _ = (peek_kind(bytes), peek_tag(bytes), peek_unknown_op(bytes), Hello::versions(bytes));
    call(bytes);
    for &op in Op::ALL {
        let _ = Call::get(op, &mut Input(bytes));
    }
    if let Ok(head) = ReplyHead::get_message(&mut Input(bytes)) {
        let _ = head.error();
    }
    let mut input = Input(bytes);
    if let Ok(head) = NotifyHead::get_message(&mut input)
        && let Ok(recall) = RecallMessage::get(head.tag, &mut input)
    {
        let mut out = Vec::new();
        recall.put_message(&mut out);
        assert!(out.len() <= bytes.len(), "no more than was read");
    }
    let _ = Hello::from_message(bytes);
    let _ = (ReplicaHello::from_message(bytes), ReplicaHello::versions(bytes));
    let _ = ReplicaWelcome::from_message(bytes);
    let _ = (BatchHead::get_message(bytes), BatchReply::get_message(bytes));
    let _ = (
        AuditHello::from_message(bytes),
        AuditHello::versions(bytes),
        AuditWelcome::from_message(bytes),
    );
    let _ = (AuditCall::get_message(bytes), AuditReply::get_message(bytes));
    let _ = Challenge::from_message(bytes);
    let _ = Proof::from_message(bytes);
    let _ = Welcome::from_message(bytes);
    // A field that was appended may be written or left out where it has its default.
    if let Ok(refused) = Input::whole::<Refused>(bytes) {
        let mut out = Vec::new();
        refused.put(&mut out);
        assert_eq!(Input::whole::<Refused>(&out), Ok(refused), "one encoding has one meaning");
    }
    again::<Entry>(bytes);
    again::<Statfs>(bytes);
    again::<Identity>(bytes);
    again::<Change>(bytes);
    again::<(Stamp, Ticket)>(bytes);
    again::<FileDurableStamp>(bytes);
    again::<AuditCall>(bytes);
    again::<AuditReply>(bytes);
    let _ = (get_durable_stamps(bytes), ReplyHead::split(bytes));
    // Names within a page may be cut to what a page can hold: only that it is understood.
    let _ = get_page(bytes);
});
