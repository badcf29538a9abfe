"""What a Valkey server does in one step, as Lua.

Every script has the same keys: the request (a hash), its tokens (a list of packed spans), its
lease (the owner, with an expiry). The request's `owner` decides; the lease only tells whether
that owner still renews. Times are durations in milliseconds, so clocks need not agree. A
request and its tokens expire in the same millisecond: time stands still within a script.

A server without memory refuses a script's first write only if that is one that adds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Script:
    body: str
    sha1: str = field(init=False)  # by which a server knows a script that it has seen

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha1", hashlib.sha1(self.body.encode(), usedforsecurity=False).hexdigest())


OWNED, ABORTED, TAKEN, MISSING = 0, 1, 2, 3
"""What RENEW answers."""

# ARGV: owner, lease, then the hash's other fields and values.
CREATE = Script("""
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return 0 end
if owner then redis.call('DEL', KEYS[1], KEYS[2]) end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2] + redis.call('HGET', KEYS[1], 'window'))
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
return 1
""")

# ARGV: owner, then spans. A new list expires with its request.
APPEND = Script("""
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
if redis.call('RPUSH', KEYS[2], unpack(ARGV, 2)) == #ARGV - 1 then
  redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
end
return 1
""")

# ARGV: owner, lease.
RENEW = Script(f"""
local fields = redis.call('HMGET', KEYS[1], 'owner', 'window', 'aborted')
if not fields[1] then return {MISSING} end
if fields[1] ~= ARGV[1] then return {TAKEN} end
local expiry = ARGV[2] + fields[2]
redis.call('PEXPIRE', KEYS[1], expiry)
redis.call('PEXPIRE', KEYS[2], expiry)
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
return fields[3] and {ABORTED} or {OWNED}
""")

# ARGV: owner.
FINISH = Script("""
local fields = redis.call('HMGET', KEYS[1], 'owner', 'window')
if fields[1] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'finished', 1)
redis.call('PEXPIRE', KEYS[1], fields[2])
redis.call('PEXPIRE', KEYS[2], fields[2])
redis.call('DEL', KEYS[3])
return 1
""")

# ARGV: owner.
DELETE = Script("""
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
""")

# ARGV: owner, lease, fingerprint, 1 to take over. Answers {fields}, {fields, spans}, or {fields, owner, what
# is left of its lease}: of no request, a claimed one, one that stays with its owner.
CLAIM = Script("""
local names = {'owner', 'fingerprint', 'window', 'start', 'request', 'finished', 'aborted', 'numerics'}
local fields = redis.call('HMGET', KEYS[1], unpack(names))
if not fields[1] then return {fields} end
if fields[2] ~= ARGV[3] then return {fields, fields[1], 0} end
local lease = redis.call('PTTL', KEYS[3])
if fields[1] ~= ARGV[1] and lease > 0 and ARGV[4] ~= '1' then return {fields, fields[1], lease} end
local expiry = ARGV[2] + fields[3]
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
redis.call('PEXPIRE', KEYS[1], expiry)
redis.call('PEXPIRE', KEYS[2], expiry)
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
return {fields, redis.call('LRANGE', KEYS[2], 0, -1)}
""")

REQUEST_ABORT = Script("""
local fields = redis.call('HMGET', KEYS[1], 'owner', 'finished')
if not fields[1] or fields[2] then return 0 end
return redis.call('HSETNX', KEYS[1], 'aborted', 1)
""")
