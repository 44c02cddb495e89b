-- A table whose rows are touched one by one.

CREATE TABLE bench.accounts (id bigint PRIMARY KEY, owner text, balance numeric(12,2), touched timestamptz);

CREATE FUNCTION bench.open_accounts(low bigint, high bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO bench.accounts SELECT i, 'owner ' || i, 100, now() FROM generate_series(low, high) i
$$;

-- The first number chooses one of as many accounts as the second says.
CREATE FUNCTION bench.touch_account(number bigint, among bigint) RETURNS void LANGUAGE sql AS $$
    UPDATE bench.accounts SET balance = balance + 1, touched = clock_timestamp() WHERE id = number * 611953 % among + 1
$$;

-- One transaction after the other, each of one row, at a rate. Inserts, if there are no accounts to choose among.
CREATE PROCEDURE bench.write_steadily(first bigint, among bigint, rate int, seconds float8, INOUT done bigint) LANGUAGE plpgsql AS $$
DECLARE
    begun timestamptz := clock_timestamp();
    passed float8;
BEGIN
    done := 0;
    LOOP
        passed := extract(epoch FROM clock_timestamp() - begun);
        EXIT WHEN passed >= seconds;
        WHILE done < least(passed, seconds) * rate LOOP
            done := done + 1;
            IF among = 0 THEN
                PERFORM bench.open_accounts(first + done, first + done);
            ELSE
                PERFORM bench.touch_account(first + done, among);
            END IF;
            COMMIT;
        END LOOP;
        PERFORM pg_sleep(0.002);
        COMMIT;
    END LOOP;
END
$$;
