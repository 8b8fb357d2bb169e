//! Attributes by which a client learns where the data of a file are whose name is at another
//! server.

/// The attribute of a file with the id of its objects: 16 random bytes. The server of a
/// projection's names answers it to any client that may have a session. `ENODATA`: the file has no
/// data so far.
pub const OBJECT_ATTRIBUTE: &[u8] = b"trusted.dray.object";

/// A request for this attribute gets the same value. The server gives the file an id if it has
/// none.
pub const NEW_OBJECT_ATTRIBUTE: &[u8] = b"trusted.dray.object.new";
