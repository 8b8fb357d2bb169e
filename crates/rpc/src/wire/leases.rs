//! Leases that a server asks back ([`NotifyHead::RECALL`](super::NotifyHead::RECALL)), and the
//! client's answer.

use dray_core::{LeaseKinds, NameBuf, RecallItem};

use crate::wire::NotifyHead;
use crate::wire::codec::{Input, Malformed, Wire};

/// Items of one recall.
pub const RECALL_ITEMS_MAX: usize = 256;

/// Leases that a server asks back together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecallMessage {
    /// The number among the recalls of the session. The answer has it.
    pub number: u64,
    /// At most [`RECALL_ITEMS_MAX`].
    pub items: Vec<RecallItem>,
}

impl RecallMessage {
    /// Appends the whole message, from its kind on.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        assert!(self.items.len() <= RECALL_ITEMS_MAX, "a recall that no message takes");
        let tag = self.items.len() as u32;
        NotifyHead { what: NotifyHead::RECALL, flags: 0, tag }.put_message(out);
        self.number.put(out);
        self.items.iter().for_each(|item| item.put(out));
    }

    /// What stands behind the head, whose argument is `count`. Errors: too many items, or fewer are
    /// there, or a name is none.
    pub fn get(count: u32, input: &mut Input<'_>) -> Result<RecallMessage, Malformed> {
        if count as usize > RECALL_ITEMS_MAX {
            return Err(Malformed("too many items of a recall"));
        }
        let number = input.get()?;
        let items = (0..count).map(|_| input.get()).collect::<Result<_, _>>()?;
        Ok(RecallMessage { number, items })
    }

    /// Appends the whole message by which a client answers the recall of this number.
    pub fn put_answer(number: u64, out: &mut Vec<u8>) {
        NotifyHead { what: NotifyHead::RECALLED, flags: 0, tag: 0 }.put_message(out);
        number.put(out);
    }
}

impl<'a> Wire<'a> for LeaseKinds {
    fn put(&self, out: &mut Vec<u8>) {
        self.bits().put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<LeaseKinds, Malformed> {
        LeaseKinds::from_bits(input.get()?).ok_or(Malformed("an unknown kind of lease"))
    }
}

impl<'a> Wire<'a> for RecallItem {
    fn put(&self, out: &mut Vec<u8>) {
        (self.id, self.kinds).put(out);
        self.name.as_ref().map(|name| name.as_bytes()).put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<RecallItem, Malformed> {
        let (id, kinds) = input.get()?;
        let name = input.get::<Option<&[u8]>>()?.map(NameBuf::new).transpose();
        let name = name.map_err(|_| Malformed("a recall of what is no name"))?;
        Ok(RecallItem { id, kinds, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{FileId, NAME_MAX_BYTES};
    use dray_fabric::HEAD_MAX_BYTES;

    #[test]
    fn the_largest_recall_fits_a_message_and_a_larger_one_is_refused() {
        let id = FileId { ino: 1, generation: 2 };
        let name = NameBuf::new(&[b'n'; NAME_MAX_BYTES]).ok();
        let item = RecallItem { id, kinds: LeaseKinds::NAMES, name };
        let recall = RecallMessage { number: 7, items: vec![item; RECALL_ITEMS_MAX] };
        let mut message = Vec::new();
        recall.put_message(&mut message);
        assert!(message.len() <= HEAD_MAX_BYTES);
        let mut input = Input(&message);
        let head = NotifyHead::get_message(&mut input).unwrap();
        assert_eq!((head.what, head.tag), (NotifyHead::RECALL, RECALL_ITEMS_MAX as u32));
        assert_eq!(RecallMessage::get(head.tag, &mut input.clone()), Ok(recall));
        assert!(RecallMessage::get(head.tag, &mut Input(&input.0[1..])).is_err());
        assert!(RecallMessage::get(head.tag + 1, &mut input).is_err());
    }

    #[test]
    fn what_is_no_name_and_no_kind_is_malformed() {
        for (kinds, name) in [(2u8, &b"a/b"[..]), (2, b""), (16, b"a")] {
            let mut message = Vec::new();
            (7u64, (FileId { ino: 1, generation: 2 }, kinds)).put(&mut message);
            Some(name).put(&mut message);
            assert!(RecallMessage::get(1, &mut Input(&message)).is_err(), "{kinds} {name:?}");
        }
    }
}
